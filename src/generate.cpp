#include "gptfast/generate.h"
