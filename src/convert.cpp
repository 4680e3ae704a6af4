#include "gptfast/convert.h"
