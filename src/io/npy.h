// NumPy's .npy format: read versions 1 to 3, written as 1.0.
#pragma once
#include <memory>
#include <string>

#include "io/array.h"

namespace tilewise::io {

// float16, float32, float64, int32, int64, bool, and uint8 of zeros and ones (as a mask); little-endian; 1 to 4
// dimensions. Fortran order is brought into C order. The file must hold exactly what its header says.
Status read_npy(const std::string& path, Array* out);
Status parse_npy(const std::string& name, const std::shared_ptr<Buffer>& file, Array* out);

// Header of a little-endian C-order array, padded so that the data begin at a multiple of 64.
std::string npy_header(int32_t dtype, std::span<const int64_t> shape);

}  // namespace tilewise::io
