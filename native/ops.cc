// The operations of `hvd_compress.kernels.native`: HvdCompressEncode, HvdCompressDecode and HvdCompressSubtract for
// buckets, HvdCompressEncodeTableRows and HvdCompressDecodeTableRows for rows of tables.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cast16.h"
#include "chunk.h"
#include "hadamard.h"
#include "int2.h"
#include "onebit.h"
#include "pool.h"
#include "quantize.h"
#include "rows.h"
#include "strided.h"
#include "tf_api.h"
#include "topk.h"

namespace {

// The same numbers as in `hvd_compress.kernels.native`.
enum Method : int64_t {
  kQuantize = 0, kOneBit = 1, kBlockTopK = 2, kHybrid = 3, kTopK = 4, kHadamard = 5, kHalf = 6, kBrain = 7, kInt2 = 8
};

// Payloads of more ranks are summed in groups of so many, as `exchange.coding`.
constexpr int kRanksPerGroup = 8;

constexpr int64_t kLargestChunk = std::numeric_limits<int32_t>::max();  // positions are 32 bits

struct Format {
  int64_t method, bits;

  bool is_valid() const {
    const bool has_bits = method == kQuantize || method == kHybrid;
    return method >= kQuantize && method <= kInt2 && (has_bits ? bits >= 1 && bits <= 8 : bits == 0);
  }

  int64_t bytes(int64_t n, int64_t kept) const {
    switch (method) {
      case kQuantize: return quantize::bytes(n, static_cast<int>(bits));
      case kOneBit: return onebit::bytes(n);
      case kBlockTopK: return strided::bytes(n, kept, 0);
      case kHybrid: return strided::bytes(n, kept, static_cast<int>(bits));
      case kTopK: return topk::bytes(n, kept);
      case kHadamard: return hadamard::bytes(n);
      case kInt2: return int2::bytes(n);
      default: return 2 * n;
    }
  }

  bool encode(const Source& source, const Encoding& how, uint8_t* payload, float* residual) const {
    switch (method) {
      case kQuantize: return quantize::encode(source, how, payload, residual);
      case kOneBit: return onebit::encode(source, payload, residual);
      case kBlockTopK:
      case kHybrid: return strided::encode(source, how, payload, residual);
      case kTopK: {
        if (residual) return topk::encode(source, how, payload, residual);
        std::vector<float> sums(source.size);
        return topk::encode(source, how, payload, sums.data());
      }
      case kHadamard: return hadamard::encode(source, payload, residual);
      case kInt2: return int2::encode(source, payload, residual);
      default: return cast16::encode(source, method == kHalf, payload, residual);
    }
  }

  // Writes the scaled sum of the payloads of all ranks to `out` [n].
  void decode(const std::vector<const uint8_t*>& ranks, int64_t n, int64_t kept, float scale, float* out) const {
    const bool sparse = method == kBlockTopK || method == kHybrid || method == kTopK;
    if (sparse) std::memset(out, 0, n * sizeof(float));
    bool valid = true;
    std::vector<int64_t> indices;
    for (size_t first = 0; first < ranks.size(); first += kRanksPerGroup) {
      const uint8_t* const* group = ranks.data() + first;
      const int count = static_cast<int>(ranks.size() - first < kRanksPerGroup ? ranks.size() - first : kRanksPerGroup);
      const bool add = first > 0;
      const int width = static_cast<int>(bits);
      switch (method) {
        case kQuantize: quantize::decode(group, count, n, width, scale, add, out); break;
        case kOneBit: onebit::decode(group, count, n, scale, add, out); break;
        case kBlockTopK:
        case kHybrid:
          for (int rank = 0; rank < count; ++rank) valid &= strided::decode(group[rank], n, kept, width, scale, out);
          break;
        case kTopK:
          for (int rank = 0; rank < count; ++rank) valid &= topk::decode(group[rank], n, kept, scale, &indices, out);
          break;
        case kHadamard: hadamard::decode(group, count, n, scale, add, out); break;
        case kInt2: int2::decode(group, count, n, scale, add, out); break;
        default: cast16::decode(group, count, n, method == kHalf, scale, add, out);
      }
    }
    // A factor of NaN, and damaged indices, reach every element.
    if (sparse && (!valid || scale != scale))
      for (int64_t j = 0; j < n; ++j) out[j] = std::numeric_limits<float>::quiet_NaN();
  }
};

// Reads attributes; the first failure ends the construction of the kernel.
class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* construction) : construction_(construction), status_(TF_NewStatus()) {}
  ~Attributes() {
    if (TF_GetCode(status_) != TF_OK) TF_OpKernelConstruction_Failure(construction_, status_);
    TF_DeleteStatus(status_);
  }

  void require(bool condition, const char* message) {
    if (ok() && !condition) TF_SetStatus(status_, TF_INVALID_ARGUMENT, message);
  }

  int64_t integer(const char* name) {
    int64_t value = 0;
    if (ok()) TF_OpKernelConstruction_GetAttrInt64(construction_, name, &value, status_);
    return value;
  }

  float real(const char* name) {
    float value = 0.0f;
    if (ok()) TF_OpKernelConstruction_GetAttrFloat(construction_, name, &value, status_);
    return value;
  }

  bool boolean(const char* name) {
    unsigned char value = 0;
    if (ok()) TF_OpKernelConstruction_GetAttrBool(construction_, name, &value, status_);
    return value != 0;
  }

  std::vector<int64_t> integers(const char* name) {
    int32_t size = 0, total = 0;
    if (ok()) TF_OpKernelConstruction_GetAttrSize(construction_, name, &size, &total, status_);
    std::vector<int64_t> values(size > 0 ? size : 0);
    if (ok() && size > 0) TF_OpKernelConstruction_GetAttrInt64List(construction_, name, values.data(), size, status_);
    return values;
  }

 private:
  bool ok() const { return TF_GetCode(status_) == TF_OK; }
  TF_OpKernelConstruction* construction_;
  TF_Status* status_;
};

// The tensors of one call; deletes its handles at the end, and reports the first failure.
class Call {
 public:
  explicit Call(TF_OpKernelContext* context) : context_(context), status_(TF_NewStatus()) {}
  ~Call() {
    for (TF_Tensor* tensor : tensors_) TF_DeleteTensor(tensor);
    if (TF_GetCode(status_) != TF_OK) TF_OpKernelContext_Failure(context_, status_);
    TF_DeleteStatus(status_);
  }

  bool ok() const { return TF_GetCode(status_) == TF_OK; }

  void fail(const std::string& message) {
    if (ok()) TF_SetStatus(status_, TF_INVALID_ARGUMENT, message.c_str());
  }

  template <typename T>
  const T* input(int i, int64_t* size = nullptr) {
    TF_Tensor* tensor = nullptr;
    if (ok()) TF_GetInput(context_, i, &tensor, status_);
    if (!ok()) return nullptr;
    tensors_.push_back(tensor);
    if (size) *size = TF_TensorElementCount(tensor);
    return static_cast<const T*>(TF_TensorData(tensor));
  }

  template <typename T>
  T* output(int i, TF_DataType type, const std::vector<int64_t>& shape) {
    int64_t bytes = sizeof(T);
    for (const int64_t size : shape) bytes *= size;
    TF_Tensor* tensor = nullptr;
    if (ok())
      tensor = TF_AllocateOutput(context_, i, type, shape.data(), static_cast<int>(shape.size()), bytes, status_);
    if (tensor) tensors_.push_back(tensor);
    return ok() ? static_cast<T*>(TF_TensorData(tensor)) : nullptr;
  }

 private:
  TF_OpKernelContext* context_;
  TF_Status* status_;
  std::vector<TF_Tensor*> tensors_;
};

// The seed of a chunk's stochastic rounding.
int32_t noise_seed(int32_t seed, int64_t chunk, int64_t salt) {
  return quantize::fold(quantize::fold(seed, static_cast<int32_t>(chunk)), static_cast<int32_t>(salt));
}

// Encodes the chunks of a bucket, one after the other, into one payload, whose last bytes are its flag.
struct Encode {
  Format format;
  Encoding how;
  std::vector<int64_t> kept, pieces_of;  // of each chunk
  int64_t pieces, residuals, kept_residuals, first_chunk, salt, nbytes, flagged_bytes, threads;
  float decay;

  explicit Encode(TF_OpKernelConstruction* construction) {
    Attributes attributes(construction);
    format = {attributes.integer("method"), attributes.integer("bits")};
    how = {static_cast<int>(format.bits), attributes.boolean("stochastic"), 0, 0};
    kept = attributes.integers("kept");
    pieces_of = attributes.integers("pieces_of");
    pieces = attributes.integer("N");
    residuals = attributes.integer("M");
    kept_residuals = attributes.integer("K");
    first_chunk = attributes.integer("first_chunk");
    salt = attributes.integer("salt");
    nbytes = attributes.integer("nbytes");
    flagged_bytes = attributes.integer("flagged_bytes");
    threads = attributes.integer("threads");
    decay = attributes.real("decay");
    attributes.require(format.is_valid(), "HvdCompressEncode: no such method or number of bits");
  }

  void compute(TF_OpKernelContext* context) const {
    Call call(context);
    const int64_t chunks = static_cast<int64_t>(kept.size());
    if (chunks < 1 || static_cast<int64_t>(pieces_of.size()) != chunks || (residuals && residuals != chunks) ||
        (kept_residuals && kept_residuals != chunks))
      return call.fail("HvdCompressEncode: the numbers of chunks, residuals and `kept` differ");
    std::vector<Source> sources;
    std::vector<int64_t> begins{0};
    int64_t next = 0;  // piece
    for (int64_t c = 0; c < chunks && call.ok(); ++c) {
      Source source{{}, nullptr, decay, 0};
      for (int64_t end = next + pieces_of[c]; next < end && call.ok(); ++next) {
        int64_t size = 0;
        const float* data = next < pieces ? call.input<float>(static_cast<int>(next), &size) : nullptr;
        if (data == nullptr || size < 1 || source.size + size > kLargestChunk)
          return call.fail("HvdCompressEncode: a chunk is too large, or a piece is empty or missing");
        source.pieces.push_back({data, source.size, source.size + size});
        source.size += size;
      }
      int64_t of_residual = source.size;
      if (residuals) source.residual = call.input<float>(static_cast<int>(pieces + c), &of_residual);
      if (source.size < 1 || of_residual != source.size || kept[c] < 1 || kept[c] > source.size)
        return call.fail("HvdCompressEncode: a chunk is empty, or its residual has another size");
      begins.push_back(begins.back() + format.bytes(source.size, kept[c]));
      sources.push_back(std::move(source));
    }
    if (next != pieces) return call.fail("HvdCompressEncode: there are pieces of no chunk");
    const int seed_input = static_cast<int>(pieces + residuals);
    const int32_t* seed = call.input<int32_t>(seed_input);
    const bool* before = call.input<bool>(seed_input + 1);
    if (call.ok() && (begins.back() != nbytes || flagged_bytes < nbytes))
      call.fail("HvdCompressEncode: the payload has another length than expected");
    uint8_t* payload = call.output<uint8_t>(0, TF_UINT8, {flagged_bytes});
    std::vector<float*> new_residuals(chunks, nullptr);
    for (int64_t c = 0; c < kept_residuals && call.ok(); ++c)
      new_residuals[c] = call.output<float>(static_cast<int>(1 + c), TF_FLOAT, {sources[c].size});
    bool* ok = call.output<bool>(static_cast<int>(1 + kept_residuals), TF_BOOL, {});
    if (!call.ok()) return;

    std::atomic<bool> finite{*before};
    const bool done = Pool::run(chunks, threads, [&](int64_t c) {
      Encoding encoding = how;
      encoding.kept = kept[c];
      if (how.stochastic) encoding.seed = noise_seed(*seed, first_chunk + c, salt);
      if (!format.encode(sources[c], encoding, payload + begins[c], new_residuals[c])) finite = false;
      finish_writes();
    });
    if (!done) return call.fail("HvdCompressEncode: out of memory");
    *ok = finite;
    std::memset(payload + nbytes, finite ? 0 : 1, flagged_bytes - nbytes);
  }
};

CLONED void subtract(const uint8_t* a, const uint8_t* b, int64_t n, uint8_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(a[i] - b[i]);
}

// Decodes the payloads of all ranks to the scaled sum of each chunk. The chunks are outputs of their own, or one output
// end to end. They may come in shares of equal length, each with payloads of its own: first those of all ranks of the
// first share. If `summed`, there are two ranks, and in place of the second payload the sum of both, modulo 256.
struct Decode {
  Format format;
  std::vector<int64_t> sizes, kept;
  int64_t payloads, shares, outputs, nbytes, threads;
  bool summed;

  explicit Decode(TF_OpKernelConstruction* construction) {
    Attributes attributes(construction);
    format = {attributes.integer("method"), attributes.integer("bits")};
    sizes = attributes.integers("sizes");
    kept = attributes.integers("kept");
    payloads = attributes.integer("N");
    shares = attributes.integer("shares");
    outputs = attributes.integer("C");
    summed = attributes.boolean("summed");
    nbytes = attributes.integer("nbytes");
    threads = attributes.integer("threads");
    attributes.require(format.is_valid(), "HvdCompressDecode: no such method or number of bits");
  }

  void compute(TF_OpKernelContext* context) const {
    Call call(context);
    const int64_t chunks = static_cast<int64_t>(sizes.size());
    if (static_cast<int64_t>(kept.size()) != chunks || (outputs != 1 && outputs != chunks))
      return call.fail("HvdCompressDecode: the numbers of chunks, `kept` and outputs differ");
    if (shares < 1 || chunks % shares || payloads % shares || (summed && payloads != 2 * shares))
      return call.fail("HvdCompressDecode: the chunks or the payloads cannot be divided into the shares");
    std::vector<const uint8_t*> given;
    for (int64_t i = 0; i < payloads && call.ok(); ++i) {
      int64_t length = 0;
      given.push_back(call.input<uint8_t>(static_cast<int>(i), &length));
      if (length < nbytes) call.fail("HvdCompressDecode: a payload is shorter than expected");
    }
    const float* scale = call.input<float>(static_cast<int>(payloads));
    const int64_t of_share = chunks / shares, ranks = payloads / shares;
    std::vector<int64_t> begins;  // of each chunk in its payload
    int64_t begin = 0, total = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      if (sizes[c] < 1 || sizes[c] > kLargestChunk || kept[c] < 1 || kept[c] > sizes[c])
        return call.fail("HvdCompressDecode: a chunk has no such size");
      if (c % of_share == 0) begin = 0;
      begins.push_back(begin);
      begin += format.bytes(sizes[c], kept[c]);
      total += sizes[c];
      if ((c + 1) % of_share == 0 && begin != nbytes)
        return call.fail("HvdCompressDecode: the payload has another length than expected");
    }
    std::vector<float*> out;  // where each chunk goes
    float* next = nullptr;
    for (int64_t c = 0; c < chunks; ++c) {
      if (c < outputs) next = call.output<float>(static_cast<int>(c), TF_FLOAT, {outputs == 1 ? total : sizes[c]});
      if (!call.ok()) return;
      out.push_back(next);
      next += sizes[c];
    }
    const bool done = Pool::run(chunks, threads, [&](int64_t c) {
      std::vector<const uint8_t*> of_chunk;
      for (int64_t rank = 0; rank < ranks; ++rank) of_chunk.push_back(given[c / of_share * ranks + rank] + begins[c]);
      std::unique_ptr<uint8_t[]> second;  // not cleared, unlike a vector
      if (summed) {
        const int64_t length = format.bytes(sizes[c], kept[c]);
        second.reset(new uint8_t[length]);
        subtract(of_chunk[1], of_chunk[0], length, second.get());
        of_chunk[1] = second.get();
      }
      format.decode(of_chunk, sizes[c], kept[c], *scale, out[c]);
    });
    if (!done) call.fail("HvdCompressDecode: out of memory");
  }
};

// The difference of two vectors of bytes, modulo 256.
struct Subtract {
  explicit Subtract(TF_OpKernelConstruction*) {}

  void compute(TF_OpKernelContext* context) const {
    Call call(context);
    int64_t size = 0, other = 0;
    const uint8_t *a = call.input<uint8_t>(0, &size), *b = call.input<uint8_t>(1, &other);
    if (size != other) call.fail("HvdCompressSubtract: the vectors differ in length");
    uint8_t* out = call.output<uint8_t>(0, TF_UINT8, {size});
    if (call.ok()) subtract(a, b, size, out);
  }
};

// The form of rows, and how many of them one thread takes at a time.
struct RowPieces {
  rows::Form form;
  int64_t threads, piece;

  explicit RowPieces(Attributes* attributes, const char* error) {
    const int64_t method = attributes->integer("method"), bits = attributes->integer("bits");
    const rows::Code code = method == kOneBit ? rows::kSigns : method == kHadamard ? rows::kRotated : rows::kSteps;
    form = {code, static_cast<int>(bits), attributes->integer("columns"), attributes->integer("blocks"),
            attributes->integer("block"), attributes->integer("number_bytes")};
    threads = attributes->integer("threads");
    attributes->require((method == kQuantize || code != rows::kSteps) && form.is_valid(), error);
    piece = form.columns >= 1 ? std::max<int64_t>(1, kElementsOfThread / form.columns) : 1;
  }

  // Calls `work(first, last)` for pieces of `count` rows; returns whether that worked.
  template <typename Work>
  bool run(int64_t count, Work work) const {
    return Pool::run(ceil_div(count, piece), threads,
                     [&](int64_t i) { work(i * piece, std::min(count, (i + 1) * piece)); });
  }

  static constexpr int64_t kElementsOfThread = 1 << 16;
};

// Encodes the rows of a table; each becomes a row of the payload.
struct EncodeRows {
  RowPieces pieces;
  bool stochastic;
  int64_t chunk, salt;

  explicit EncodeRows(TF_OpKernelConstruction* construction) : EncodeRows(Attributes(construction)) {}
  explicit EncodeRows(Attributes&& attributes)
      : pieces(&attributes, "HvdCompressEncodeTableRows: there are no such rows"),
        stochastic(attributes.boolean("stochastic")),
        chunk(attributes.integer("chunk")),
        salt(attributes.integer("salt")) {}

  void compute(TF_OpKernelContext* context) const {
    Call call(context);
    int64_t count = 0, elements = 0;
    const int64_t* numbers = call.input<int64_t>(0, &count);
    const float* values = call.input<float>(1, &elements);
    const int32_t* seed = call.input<int32_t>(2);
    if (call.ok() && elements != count * pieces.form.columns)
      call.fail("HvdCompressEncodeTableRows: the numbers and the values are not of equally many rows");
    uint8_t* payload = call.output<uint8_t>(0, TF_UINT8, {count, pieces.form.bytes()});
    float* residual = call.output<float>(1, TF_FLOAT, {count, pieces.form.columns});
    if (!call.ok()) return;
    const Encoding how{pieces.form.bits, stochastic, noise_seed(*seed, chunk, salt), 0};
    const bool done = pieces.run(count, [&](int64_t first, int64_t last) {
      rows::encode(pieces.form, how, numbers, values, first, last, payload, residual);
    });
    if (!done) call.fail("HvdCompressEncodeTableRows: out of memory");
  }
};

struct DecodeRows {
  RowPieces pieces;

  explicit DecodeRows(TF_OpKernelConstruction* construction) : DecodeRows(Attributes(construction)) {}
  explicit DecodeRows(Attributes&& attributes) : pieces(&attributes, "HvdCompressDecodeTableRows: there are no such rows") {}

  void compute(TF_OpKernelContext* context) const {
    Call call(context);
    int64_t length = 0;
    const uint8_t* payload = call.input<uint8_t>(0, &length);
    if (call.ok() && length % pieces.form.bytes())
      call.fail("HvdCompressDecodeTableRows: the payload has another length than expected");
    const int64_t count = length / pieces.form.bytes();
    int64_t* numbers = call.output<int64_t>(0, TF_INT64, {count});
    float* values = call.output<float>(1, TF_FLOAT, {count, pieces.form.columns});
    if (!call.ok()) return;
    const bool done = pieces.run(count, [&](int64_t first, int64_t last) {
      rows::decode(pieces.form, payload, first, last, numbers, values);
    });
    if (!done) call.fail("HvdCompressDecodeTableRows: out of memory");
  }
};

void unknown_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

template <typename Kernel>
void register_op(const char* name, const std::vector<const char*>& inputs, const std::vector<const char*>& outputs,
                 const std::vector<const char*>& attributes) {
  TF_Status* status = TF_NewStatus();
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder(name);
  for (const char* attribute : attributes) TF_OpDefinitionBuilderAddAttr(op, attribute);
  for (const char* input : inputs) TF_OpDefinitionBuilderAddInput(op, input);
  for (const char* output : outputs) TF_OpDefinitionBuilderAddOutput(op, output);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, unknown_shapes);
  TF_RegisterOpDefinition(op, status);
  TF_KernelBuilder* kernel = TF_NewKernelBuilder(
      name, "CPU", [](TF_OpKernelConstruction* construction) -> void* { return new Kernel(construction); },
      [](void* kernel, TF_OpKernelContext* context) { static_cast<Kernel*>(kernel)->compute(context); },
      [](void* kernel) { delete static_cast<Kernel*>(kernel); });
  TF_RegisterKernelBuilder(name, kernel, status);
  TF_DeleteStatus(status);
}

const bool kRegistered = [] {
  register_op<Encode>("HvdCompressEncode",
                      {"pieces: N * float", "residuals: M * float", "seed: int32", "before: bool"},
                      {"payload: uint8", "new_residuals: K * float", "finite: bool"},
                      {"N: int >= 1", "M: int >= 0", "K: int >= 0", "method: int", "bits: int", "stochastic: bool",
                       "pieces_of: list(int)", "kept: list(int)", "decay: float", "first_chunk: int", "salt: int",
                       "nbytes: int", "flagged_bytes: int", "threads: int"});
  register_op<Decode>("HvdCompressDecode", {"payloads: N * uint8", "scale: float"}, {"chunks: C * float"},
                      {"N: int >= 1", "C: int >= 1", "shares: int", "summed: bool", "method: int", "bits: int",
                       "sizes: list(int)", "kept: list(int)", "nbytes: int", "threads: int"});
  register_op<Subtract>("HvdCompressSubtract", {"a: uint8", "b: uint8"}, {"difference: uint8"}, {});
  register_op<EncodeRows>("HvdCompressEncodeTableRows", {"numbers: int64", "values: float", "seed: int32"},
                          {"payload: uint8", "residual: float"},
                          {"method: int", "bits: int", "columns: int", "blocks: int", "block: int", "number_bytes: int",
                           "stochastic: bool", "chunk: int", "salt: int", "threads: int"});
  register_op<DecodeRows>("HvdCompressDecodeTableRows", {"payload: uint8"}, {"numbers: int64", "values: float"},
                          {"method: int", "bits: int", "columns: int", "blocks: int", "block: int", "number_bytes: int",
                           "threads: int"});
  return true;
}();

}  // namespace
