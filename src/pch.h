// Precompiled header of the library, the apps and the tests: LibTorch's headers cost 16 to 36 s a
// file without it.
#pragma once
#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include <nlohmann/json.hpp>
