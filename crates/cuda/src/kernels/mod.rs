//! The sources of the kernels, and the tables that attention reads.
//!
//! The `.cu` files are CUDA C for NVRTC and C++17 for the emulator of the tests. They name each operation's
//! formula; hone-model's fused kernels and hone-sampler's decoder are the same operations on the processor.

use cudarc::cublaslt::sys::cudaDataType;

use crate::error::{GpuError, Result};

macro_rules! with_common {
    ($file:literal) => {
        concat!(include_str!("common.cu"), include_str!($file))
    };
}

/// A type of numbers on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceFloat {
    /// 32 bits.
    F32,
    /// The upper 16 bits of them.
    #[default]
    Bf16,
}

impl DeviceFloat {
    /// Bytes of a number.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// cuBLASLt's name.
    pub(crate) fn data_type(self) -> cudaDataType {
        match self {
            Self::F32 => cudaDataType::CUDA_R_32F,
            Self::Bf16 => cudaDataType::CUDA_R_16BF,
        }
    }
}

/// A file of kernels, complete for the compiler.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// Name of the file.
    pub name: &'static str,
    /// The common part and the file.
    pub text: &'static str,
    /// The macro `HEAD_DIM` of attention.
    pub head_dim: Option<usize>,
    /// The type of weights and of activations that enter and leave products: bf16, or f32 in tests, which separates
    /// errors from rounding.
    pub float: DeviceFloat,
}

impl KernelSource {
    /// Embedding, norms, rotation and gated activations, and their gradients.
    pub const ROWS: Self = Self::new("rows.cu", with_common!("rows.cu"));
    /// Log-probabilities and entropies of tokens, and their gradients.
    pub const HEAD: Self = Self::new("head.cu", with_common!("head.cu"));
    /// Conversions of whole buffers.
    pub const FLAT: Self = Self::new("flat.cu", with_common!("flat.cu"));
    /// Tokens drawn from logits.
    pub const SAMPLE: Self = Self::new("sample.cu", with_common!("sample.cu"));
    /// Products with adapters by slot.
    pub const ADAPTERS: Self = Self::new("adapters.cu", with_common!("adapters.cu"));

    /// A source for any width of heads, with activations in bf16.
    pub const fn new(name: &'static str, text: &'static str) -> Self {
        Self { name, text, head_dim: None, float: DeviceFloat::Bf16 }
    }

    /// Attention for heads of `head_dim` values.
    ///
    /// # Errors
    /// If it is not a multiple of 8 from 8 to 256.
    pub fn attention(head_dim: usize) -> Result<Self> {
        if !(8..=256).contains(&head_dim) || !head_dim.is_multiple_of(8) {
            return Err(GpuError::Misuse(format!(
                "heads of {head_dim} values: kernels need a multiple of 8, at most 256"
            )));
        }
        let source = Self::new("attention.cu", with_common!("attention.cu"));
        Ok(Self { head_dim: Some(head_dim), ..source })
    }

    /// The names of the kernels and their parameters, as `const float* x`.
    pub fn kernels(&self) -> Vec<(&'static str, Vec<&'static str>)> {
        let signatures = self.text.split("__global__ void __launch_bounds__(").skip(1);
        let kernel = |after: &'static str| {
            let (name, rest) = after.split_once(')')?.1.split_once('(')?;
            Some((name.trim(), rest.split_once(')')?.0.split(',').map(str::trim).collect()))
        };
        signatures.filter_map(kernel).collect()
    }
}

/// Consecutive tokens of a packed pass that belong to one sequence, or to all sequences that have them in
/// common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedSegment {
    /// Index of the first token.
    pub start: usize,
    /// Tokens; may be 0.
    pub len: usize,
    /// Index of the segment that it continues: its tokens attend to all of that segment and to everything that
    /// one continues.
    pub prefix: Option<usize>,
}

/// What the attention kernels of a training pass read beside queries, keys and values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionTables {
    /// The position of each token in its sequence.
    pub positions: Vec<i32>,
    /// Tiles of queries `{row, count, first index into key_tokens, position}`.
    pub query_tiles: Vec<[i32; 4]>,
    /// For each segment the tokens at all positions up to its end.
    pub key_tokens: Vec<i32>,
    /// Tiles of keys `{token, count, begin and end in query_tokens}`.
    pub key_tiles: Vec<[i32; 4]>,
    /// For each segment its tokens and those of all segments that continue it, ascending.
    pub query_tokens: Vec<i32>,
}

impl AttentionTables {
    /// Queries, or keys, of a tile.
    pub fn tile(head_dim: usize) -> usize {
        if head_dim > 128 { 16 } else { 32 }
    }

    /// The tables for heads of `head_dim` values.
    ///
    /// # Errors
    /// If segments are not adjacent, or one precedes its prefix.
    pub fn new(segments: &[PackedSegment], head_dim: usize) -> Result<Self> {
        let tile = Self::tile(head_dim);
        let mut tables = Self::default();
        // For each segment those that it continues and itself, and the tokens of those that continue it.
        let mut chains: Vec<Vec<usize>> = Vec::new();
        let mut attending: Vec<Vec<i32>> = Vec::new();
        for (index, segment) in segments.iter().enumerate() {
            if segment.start != tables.positions.len() {
                let (start, expected) = (segment.start, tables.positions.len());
                return Err(GpuError::Misuse(format!(
                    "segment {index} starts at {start}, not {expected}"
                )));
            }
            let mut chain = match segment.prefix {
                None => Vec::new(),
                Some(prefix) => chains.get(prefix).cloned().ok_or_else(|| {
                    GpuError::Misuse(format!("segment {index} does not follow its prefix {prefix}"))
                })?,
            };
            let position: usize = chain.iter().map(|of| segments[*of].len).sum();
            chain.push(index);
            let tokens = segment.start as i32..(segment.start + segment.len) as i32;
            tables.positions.extend(position as i32..(position + segment.len) as i32);
            attending.push(Vec::new());
            chain.iter().for_each(|of| attending[*of].extend(tokens.clone()));
            let keys = tables.key_tokens.len() as i32;
            for first in (0..segment.len).step_by(tile) {
                let count = tile.min(segment.len - first);
                let row = [segment.start + first, count].map(|x| x as i32);
                tables.query_tiles.push([row[0], row[1], keys, (position + first) as i32]);
            }
            if segment.len > 0 {
                let keys = chain.iter().map(|of| segments[*of]);
                let keys = keys.flat_map(|of| of.start as i32..(of.start + of.len) as i32);
                tables.key_tokens.extend(keys);
            }
            chains.push(chain);
        }
        for (segment, tokens) in segments.iter().zip(attending) {
            let begin = tables.query_tokens.len();
            let end = (begin + tokens.len()) as i32;
            for first in (0..segment.len).step_by(tile) {
                let count = tile.min(segment.len - first);
                // Its own tokens come first, and those before the tile do not attend to it.
                let places = [segment.start + first, count, begin + first].map(|x| x as i32);
                tables.key_tiles.push([places[0], places[1], places[2], end]);
            }
            tables.query_tokens.extend(tokens);
        }
        Ok(tables)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_follow_prefixes_in_any_order() {
        let segment = |start, len, prefix| PackedSegment { start, len, prefix };
        // A prompt, two completions, of which the first continues in the last segment, and an empty one.
        let segments = [
            segment(0, 3, None),
            segment(3, 2, Some(0)),
            segment(5, 0, Some(0)),
            segment(5, 1, Some(0)),
            segment(6, 1, Some(1)),
            segment(7, 1, None),
        ];
        let tables = AttentionTables::new(&segments, 64).unwrap();
        assert_eq!(tables.positions, [0, 1, 2, 3, 4, 3, 5, 0]);
        assert_eq!(tables.key_tokens, [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 2, 3, 4, 6, 7]);
        let tiles = [[0, 3, 0, 0], [3, 2, 3, 3], [5, 1, 8, 3], [6, 1, 12, 5], [7, 1, 18, 0]];
        assert_eq!(tables.query_tiles, tiles);
        assert_eq!(tables.query_tokens, [0, 1, 2, 3, 4, 5, 6, 3, 4, 6, 5, 6, 7]);
        let tiles = [[0, 3, 0, 7], [3, 2, 7, 10], [5, 1, 10, 11], [6, 1, 11, 12], [7, 1, 12, 13]];
        assert_eq!(tables.key_tiles, tiles);
        // Two tiles: the second is not read by the queries before it.
        let tables = AttentionTables::new(&[segment(0, 20, None)], 256).unwrap();
        assert_eq!(tables.query_tiles, [[0, 16, 0, 0], [16, 4, 0, 16]]);
        assert_eq!(tables.key_tiles, [[0, 16, 0, 20], [16, 4, 16, 20]]);
    }

    #[test]
    fn kernels_are_read_from_their_source() {
        let all = KernelSource::FLAT.kernels();
        let names: Vec<&str> = all.iter().map(|kernel| kernel.0).collect();
        assert_eq!(names, ["round_values"]);
        assert_eq!(all[0].1, ["const float* x", "act* out", "offset n", "float scale"]);
    }

    #[test]
    fn broken_segments_and_heads_are_refused() {
        let gap = PackedSegment { start: 1, len: 2, prefix: None };
        let error = AttentionTables::new(&[gap], 64).unwrap_err().to_string();
        assert_eq!(error, "segment 0 starts at 1, not 0");
        let own = PackedSegment { start: 0, len: 2, prefix: Some(0) };
        let error = AttentionTables::new(&[own], 64).unwrap_err().to_string();
        assert_eq!(error, "segment 0 does not follow its prefix 0");
        for head_dim in [0, 4, 100, 264] {
            let error = KernelSource::attention(head_dim).unwrap_err().to_string();
            assert!(error.starts_with(&format!("heads of {head_dim} values")), "{error}");
        }
    }
}
