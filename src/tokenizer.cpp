#include "gptfast/tokenizer.h"
