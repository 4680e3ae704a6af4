#include "gptfast/ops.h"
