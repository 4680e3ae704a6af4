#include "gptfast/model.h"
