#include "gptfast/linear.h"
