#include "gptfast/config.h"
