#include "gptfast/sampling.h"
