// The parts of load_checkpoint that other readers and the tests use.
#pragma once

#include <map>
#include <string>

#include "gptfast/checkpoint.h"
#include "mapped_file.h"

namespace gptfast {

enum class Names {
  kStateDict,  ///< a dict whose tensors are all under "model" gives the names of that inner dict
  kAsStored,   ///< every tensor of the file, with its whole path
};

/// load_checkpoint on a file in memory. Messages lack the file's name.
StateDict read_checkpoint(const FileBytes& file, Names names,
                          std::map<std::string, std::string>* records);

/// What bytes that are no checkpoint look like, as a sentence without the subject: "is an HTML
/// page; ...".
std::string describe_foreign_file(Bytes file);

}  // namespace gptfast
