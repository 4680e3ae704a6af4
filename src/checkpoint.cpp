#include "gptfast/checkpoint.h"
