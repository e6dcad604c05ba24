//! The types that weights are stored in.

use candle_core::DType;
use candle_core::quantized::GgmlDType;

/// A format of quantized weights, as ggml defines it. A row of a matrix is a sequence of blocks, and its
/// number of values is a multiple of [`Self::values`].
///
/// `d` and `m` are f16 scales, little-endian; `q` is an unsigned integer.
///
/// | format | values | bytes | content of a block | value |
/// | --- | --- | --- | --- | --- |
/// | `Q8_0` | 32 | 34 | d, 32 signed q | `q d` |
/// | `Q4_0` | 32 | 18 | d, 16 bytes: q of values j and j + 16 | `(q - 8) d` |
/// | `Q4_1` | 32 | 20 | d, m, 16 bytes as in `Q4_0` | `q d + m` |
/// | `Q4K` | 256 | 144 | d, m, 12 bytes of scales s and offsets o, 128 bytes of q | `(d s) q - (m o)` |
/// | `Q6K` | 256 | 210 | 128 bytes and 64 bytes of q, 16 signed scales s, d | `(d s) (q - 32)` |
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockFormat {
    /// 8 bits, 32 values to a scale.
    Q8_0,
    /// 4 bits, 32 values to a scale.
    Q4_0,
    /// 4 bits, 32 values to a scale and an offset.
    Q4_1,
    /// 4 bits, 32 values to a scale and an offset of 6 bits.
    Q4K,
    /// 6 bits, 16 values to a scale of 8 bits.
    Q6K,
}

impl BlockFormat {
    /// All formats.
    pub const ALL: [Self; 5] = [Self::Q8_0, Self::Q4_0, Self::Q4_1, Self::Q4K, Self::Q6K];

    /// Values of a block.
    pub fn values(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        match self {
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q4K => 144,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a row of `columns` values, which are whole blocks.
    pub fn row_bytes(self, columns: usize) -> usize {
        columns / self.values() * self.bytes()
    }

    /// The name, as in llama.cpp: `q8_0`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q4K => "q4_k",
            Self::Q6K => "q6_k",
        }
    }

    /// candle's name.
    pub(crate) fn ggml(self) -> GgmlDType {
        match self {
            Self::Q8_0 => GgmlDType::Q8_0,
            Self::Q4_0 => GgmlDType::Q4_0,
            Self::Q4_1 => GgmlDType::Q4_1,
            Self::Q4K => GgmlDType::Q4K,
            Self::Q6K => GgmlDType::Q6K,
        }
    }
}

/// The type of a weight in a file or in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightType {
    /// Floats.
    Float(DType),
    /// Quantized blocks.
    Blocks(BlockFormat),
}

impl WeightType {
    /// Bytes of `values` values, which are whole blocks.
    pub fn size(self, values: usize) -> usize {
        match self {
            Self::Float(dtype) => values * dtype.size_in_bytes(),
            Self::Blocks(format) => format.row_bytes(values),
        }
    }

    /// The name: `q8_0`, `BF16`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Float(dtype) => dtype.as_str(),
            Self::Blocks(format) => format.as_str(),
        }
    }

    /// Whether a computation in f32 needs a converted copy of the values.
    pub fn is_widened(self) -> bool {
        matches!(self, Self::Float(DType::F16 | DType::BF16) | Self::Blocks(_))
    }
}

impl From<DType> for WeightType {
    fn from(dtype: DType) -> Self {
        Self::Float(dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_the_sizes_of_ggml() {
        for format in BlockFormat::ALL {
            assert_eq!(format.values(), format.ggml().block_size(), "{format:?}");
            assert_eq!(format.bytes(), format.ggml().type_size(), "{format:?}");
        }
    }
}
