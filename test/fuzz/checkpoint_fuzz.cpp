// libFuzzer target of the checkpoint reader: a file, or after a zero byte the pickle of one. Run
// with a corpus, for example
//   build-fuzz/bin/checkpoint_fuzz -max_len=4096 CORPUS_FOLDER test/golden/formats
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>

#include "checkpoint_reader.h"
#include "zip.h"

namespace {

using gptfast::Bytes;

gptfast::FileBytes exact_copy(Bytes bytes) {  // exactly as long as the file, so that the sanitizer
                                              // sees every read past its end
  void* memory = nullptr;
  if (::posix_memalign(&memory, gptfast::zip::kDataAlignment, bytes.empty() ? 1 : bytes.size()) !=
      0)
    std::abort();
  if (!bytes.empty()) std::memcpy(memory, bytes.data(), bytes.size());
  return {std::shared_ptr<uint8_t>(static_cast<uint8_t*>(memory), std::free), bytes.size()};
}

// A pickle in an archive whose checksums are right, which mutations of a whole file never give.
std::string archive_around(Bytes pickle) {
  std::string out;
  gptfast::zip::Writer writer([&out](Bytes bytes, uint64_t offset) {
    if (out.size() < offset + bytes.size()) out.resize(offset + bytes.size());
    std::memcpy(out.data() + offset, bytes.data(), bytes.size());
  });
  const uint8_t data[96] = {};
  writer.add("archive/data.pkl", pickle);
  writer.add("archive/data/0", Bytes(data).first(8));
  writer.add("archive/data/1", Bytes(data).first(80));
  writer.add("archive/data/2", Bytes(data));
  writer.add("archive/extra/note", Bytes(data).first(5));
  writer.finish();
  return out;
}

volatile uint8_t sink = 0;  // makes reads happen

void load(Bytes bytes, gptfast::Names names) {
  try {
    std::map<std::string, std::string> records;
    const gptfast::StateDict tensors = gptfast::read_checkpoint(exact_copy(bytes), names, &records);
    for (const auto& [name, tensor] :
         tensors) {  // the first and the last element, wherever the strides put it
      if (tensor.numel() == 0) continue;
      const auto* data = static_cast<const uint8_t*>(tensor.const_data_ptr());
      int64_t last = 0;
      for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
      sink = data[0];
      sink = data[(last + 1) * static_cast<int64_t>(tensor.element_size()) - 1];
    }
  } catch (const c10::Error&) {
    return;  // refused, as most inputs should be; any other exception is a finding
  }
}

}  // namespace

// libFuzzer gives the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Bytes input(data, size);
  if (size > 0 && data[0] == 0) {
    const std::string archive = archive_around(input.subspan(1));
    load({reinterpret_cast<const uint8_t*>(archive.data()), archive.size()},
         gptfast::Names::kStateDict);
  } else {
    load(input, gptfast::Names::kAsStored);
  }
  return 0;
}
