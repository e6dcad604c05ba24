//! How weights are held in memory.

use candle_core::DType;
use serde::{Deserialize, Serialize};

use hone_kernels::blocks::BlockFormat;

use super::matrix::WeightType;
use crate::ModelSpec;
use crate::adapter::BaseDtype;

/// Whether matrices of floats are quantized while they are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantize {
    /// They stay floats.
    #[default]
    None,
    /// To 8 bits: 8.5 bits a value with its scale.
    Q8_0,
    /// To 4 bits: 4.5 bits a value with its scales. As in llama.cpp, the output layer gets 6 bits, also
    /// where it is the embedding.
    Q4K,
}

impl Quantize {
    /// All choices.
    pub const ALL: [Self; 3] = [Self::None, Self::Q8_0, Self::Q4K];

    /// The name in configurations and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Q8_0 => "q8_0",
            Self::Q4K => "q4_k",
        }
    }

    fn formats(self, is_head: bool) -> &'static [BlockFormat] {
        match self {
            Self::None => &[],
            Self::Q8_0 => &[BlockFormat::Q8_0],
            Self::Q4K if is_head => &[BlockFormat::Q6K, BlockFormat::Q8_0],
            Self::Q4K => &[BlockFormat::Q4K, BlockFormat::Q8_0],
        }
    }
}

/// How weights are held in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// The type of matrices that are not quantized.
    pub dtype: BaseDtype,
    /// Whether matrices of floats are quantized.
    pub quantize: Quantize,
}

impl From<BaseDtype> for LoadOptions {
    fn from(dtype: BaseDtype) -> Self {
        Self { dtype, quantize: Quantize::None }
    }
}

impl LoadOptions {
    /// The type that a weight has in memory if it is stored as `stored`.
    ///
    /// Only matrices are quantized. One whose rows are not whole blocks of 256 values gets 8 bits
    /// instead of fewer, and one whose rows are not whole blocks of 32 stays as floats. Quantized
    /// matrices stay as they are, unless all weights are to be f32. Floats of 16 bits stay so with
    /// [`BaseDtype::Auto`] in matrices; all others become f32.
    pub fn in_memory(
        &self,
        spec: &ModelSpec,
        name: &str,
        shape: &[usize],
        stored: WeightType,
    ) -> WeightType {
        let f32 = WeightType::Float(DType::F32);
        let [_, columns] = shape else { return f32 };
        match stored {
            WeightType::Blocks(_) if *self == Self::from(BaseDtype::Float32) => return f32,
            WeightType::Blocks(_) => return stored,
            WeightType::Float(_) => {}
        }
        let formats = self.quantize.formats(spec.is_head(name)).iter();
        let fits = |format: &BlockFormat| columns.is_multiple_of(format.values());
        match formats.copied().find(fits) {
            Some(format) => WeightType::Blocks(format),
            None if self.dtype == BaseDtype::Auto && stored.is_widened() => stored,
            None => f32,
        }
    }

    /// Whether `held` is another type than the first choice, because rows are not whole blocks.
    pub(crate) fn is_fallback(&self, spec: &ModelSpec, name: &str, held: WeightType) -> bool {
        let first = self.quantize.formats(spec.is_head(name)).first();
        first.is_some_and(|format| held != WeightType::Blocks(*format))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tiny_spec;

    #[test]
    fn quantizes_what_fits() {
        let mut spec = tiny_spec();
        spec.tie_word_embeddings = true;
        let (bf16, f32) = (WeightType::Float(DType::BF16), WeightType::Float(DType::F32));
        let held = |quantize, dtype, name: &str, columns| {
            LoadOptions { dtype, quantize }.in_memory(&spec, name, &[4, columns], bf16)
        };
        let linear = "model.layers.0.mlp.down_proj.weight";
        for (quantize, name, columns, expected) in [
            (Quantize::None, linear, 256, bf16),
            (Quantize::Q8_0, linear, 256, WeightType::Blocks(BlockFormat::Q8_0)),
            (Quantize::Q8_0, linear, 48, bf16),
            (Quantize::Q4K, linear, 512, WeightType::Blocks(BlockFormat::Q4K)),
            (Quantize::Q4K, linear, 576, WeightType::Blocks(BlockFormat::Q8_0)),
            (Quantize::Q4K, linear, 40, bf16),
            (Quantize::Q4K, "model.embed_tokens.weight", 256, WeightType::Blocks(BlockFormat::Q6K)),
        ] {
            assert_eq!(held(quantize, BaseDtype::Auto, name, columns), expected, "{quantize:?}");
        }
        assert_eq!(held(Quantize::Q8_0, BaseDtype::Float32, linear, 40), f32);
        let options = LoadOptions { quantize: Quantize::Q8_0, ..LoadOptions::default() };
        assert_eq!(options.in_memory(&spec, "model.norm.weight", &[32], bf16), f32);
        assert!(options.is_fallback(&spec, linear, bf16));
        assert!(!options.is_fallback(&spec, linear, WeightType::Blocks(BlockFormat::Q8_0)));
        spec.tie_word_embeddings = false;
        let four = LoadOptions { quantize: Quantize::Q4K, ..LoadOptions::default() };
        let embedding = four.in_memory(&spec, "model.embed_tokens.weight", &[9, 256], bf16);
        assert_eq!(embedding, WeightType::Blocks(BlockFormat::Q4K));
    }

    #[test]
    fn quantized_files_stay_quantized_unless_all_is_f32() {
        let stored = WeightType::Blocks(BlockFormat::Q4_1);
        let held = |options: LoadOptions| {
            options.in_memory(&tiny_spec(), "lm_head.weight", &[4, 256], stored)
        };
        assert_eq!(held(LoadOptions::default()), stored);
        let to_8_bits = LoadOptions { dtype: BaseDtype::Float32, quantize: Quantize::Q8_0 };
        assert_eq!(held(to_8_bits), stored);
        assert_eq!(held(BaseDtype::Float32.into()), WeightType::Float(DType::F32));
    }

    #[test]
    fn names_are_those_of_the_configuration() {
        for choice in Quantize::ALL {
            let json = serde_json::to_string(&choice).unwrap();
            assert_eq!(json, format!("{:?}", choice.as_str()));
        }
    }
}
