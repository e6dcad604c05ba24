//! The weights of the decoder: the model's own tensors, and a copy of an adapter.

use std::ops::Range;

use candle_core::{DType, Tensor, WithDType};

use hone_core::types::TokenId;
use hone_cuda::AdapterLayout;
use hone_kernels::blocks::integer::{self, IntegerColumns};
use hone_kernels::columns::bf16::{self, Bf16Columns};
use hone_kernels::columns::{TokenColumns, WeightMatrix, add_matmul_serial};
use hone_kernels::processor::has_fast_bf16_vectors;
use hone_kernels::transpose::transpose_strided;
use hone_model::adapter::LinearKind;
use hone_model::adapter::weights::LoraWeights;
use hone_model::kernels::compute::Compute;
use hone_model::kernels::storage::{StoredValues, with_stored, with_upcast};
use hone_model::spec::AttentionOptions;
use hone_model::weights::BaseMatrix;
use hone_model::{Model, ModelSpec};

use crate::error::{Result, SamplerError};

/// One linear layer. The weight shares the model's storage.
pub(crate) struct SamplerLinear {
    pub kind: LinearKind,
    /// `[out, inner]`
    weight: BaseMatrix,
    /// `[out]`
    bias: Option<Vec<f32>>,
    pub out: usize,
    pub inner: usize,
}

/// Linear layers with the same input, whose outputs are concatenated.
pub(crate) struct LinearGroup {
    pub linears: Vec<SamplerLinear>,
    pub inner: usize,
    pub outputs: usize,
    pub rounding: InputRounding,
}

#[derive(Clone, Copy)]
pub(crate) struct LinearInput<'a> {
    pub columns: TokenColumns<'a>,
    /// The same activations as integers, for quantized weights.
    integers: Option<&'a IntegerColumns>,
    /// The same activations in bf16, for weights in bf16 if the model [computes](Model::compute) in bf16.
    bf16: Option<&'a Bf16Columns>,
}

/// What the input of linear layers is rounded to, beside f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InputRounding {
    integers: bool,
    bf16: bool,
}

impl InputRounding {
    /// For products with a matrix of a model that computes in `compute`.
    fn of(matrix: &BaseMatrix, compute: Compute) -> Self {
        let BaseMatrix::Float(tensor) = matrix else {
            return Self { integers: true, bf16: false };
        };
        let has_pairs = tensor.dims().last().is_some_and(|inner| inner.is_multiple_of(2));
        let computes = compute == Compute::Bf16 && has_fast_bf16_vectors();
        Self { integers: false, bf16: computes && has_pairs && tensor.dtype() == DType::BF16 }
    }

    fn of_all(all: impl Iterator<Item = Self>) -> Self {
        all.fold(Self::default(), |all, one| Self {
            integers: all.integers || one.integers,
            bf16: all.bf16 || one.bf16,
        })
    }

    /// Whether an input is rounded to integers, as for quantized weights.
    pub fn is_to_integers(self) -> bool {
        self.integers
    }

    pub fn dtype(self) -> &'static str {
        match self {
            Self { integers: true, .. } => "i16",
            Self { bf16: true, .. } => "bf16",
            Self { .. } => "f32",
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct RoundedColumns {
    integers: IntegerColumns,
    bf16: Bf16Columns,
}

impl RoundedColumns {
    /// Rounds the activations of linear layers with `inner` inputs, on up to `threads` threads of the current
    /// pool, each with at least `least` of them.
    pub fn round<'a>(
        &'a mut self,
        rounding: InputRounding,
        columns: TokenColumns<'a>,
        inner: usize,
        (threads, least): (usize, usize),
    ) -> LinearInput<'a> {
        let split = (threads, least);
        let integers = rounding.integers.then(|| self.integers.round(columns, inner, split));
        let bf16 = rounding.bf16.then(|| self.bf16.round(columns, inner, threads));
        LinearInput { columns, integers, bf16 }
    }

    /// Bytes of `tokens` columns of `inner` activations as integers, which need more than in bf16.
    pub fn bytes(tokens: usize, inner: usize) -> usize {
        IntegerColumns::bytes(tokens, inner)
    }
}

/// One decoder layer. Norm weights include the model's offset.
pub(crate) struct DecoderLayer {
    /// Before attention and before the MLP.
    pub norms: [Vec<f32>; 2],
    /// After attention and after the MLP.
    pub output_norms: Option<[Vec<f32>; 2]>,
    /// Over each query head and each key head.
    pub head_norms: Option<[Vec<f32>; 2]>,
    pub qkv: LinearGroup,
    pub o: LinearGroup,
    pub gate_up: LinearGroup,
    pub down: LinearGroup,
    pub rope: bool,
    pub options: AttentionOptions,
}

/// The base model. Matrices share the model's storage; norms and biases are copied.
pub(crate) struct BaseWeights {
    pub spec: ModelSpec,
    embedding: BaseMatrix,
    head: BaseMatrix,
    pub head_rounding: InputRounding,
    pub norm: Vec<f32>,
    pub layers: Vec<DecoderLayer>,
    /// Bytes of the matrices that a decoding step reads: all but the embedding, unless it is the head.
    pub bytes: usize,
}

impl BaseWeights {
    /// Shares a model's weights.
    pub fn new(model: &Model) -> Result<Self> {
        let spec = model.spec().clone();
        let layers = (0..spec.num_layers).map(|layer| DecoderLayer::new(model, layer));
        let layers: Vec<DecoderLayer> = layers.collect::<Result<_>>()?;
        let head = readable(model.head())?;
        let groups = layers.iter().flat_map(|l| [&l.qkv, &l.o, &l.gate_up, &l.down]);
        let linears = groups.flat_map(|group| &group.linears).map(|linear| &linear.weight);
        Ok(Self {
            bytes: linears.chain([&head]).map(BaseMatrix::size).sum(),
            embedding: readable(model.embedding())?,
            head_rounding: InputRounding::of(&head, model.compute()),
            head,
            norm: norm_weight(model.norm(), &spec)?,
            layers,
            spec,
        })
    }

    /// Writes a token's embedding, times `scale`, to `out` `[hidden]`.
    pub fn embed(&self, token: TokenId, out: &mut [f32], scale: f32) -> Result<()> {
        let (vocab, hidden) = (self.spec.vocab_size, self.spec.hidden_size);
        let row = token as usize;
        if row >= vocab {
            let reason = format!("token {token} is outside the vocabulary of {vocab}");
            return Err(SamplerError::Refused(reason));
        }
        let range = row * hidden..(row + 1) * hidden;
        Ok(with_upcast(&self.embedding, range, "decoder", |row: &[f32]| {
            out.iter_mut().zip(row).for_each(|(out, x)| *out = x * scale);
            Ok(())
        })?)
    }

    /// Computes the logits of consecutive tokens from `first` on, as many as `out` `[tokens, width]` has.
    pub fn head(&self, out: &mut [f32], first: usize, x: LinearInput<'_>) -> Result<()> {
        multiply_stored(out, &self.head, first, None, x)
    }

    /// What the inputs of all layers and of the head are rounded to.
    pub fn rounding(&self) -> InputRounding {
        let groups = self.layers.iter().flat_map(|l| [&l.qkv, &l.o, &l.gate_up, &l.down]);
        let layers = groups.map(|group| group.rounding);
        InputRounding::of_all(layers.chain([self.head_rounding]))
    }
}

impl DecoderLayer {
    fn new(model: &Model, layer: usize) -> Result<Self> {
        let spec = model.spec();
        let missing = || SamplerError::Weights(format!("layer {layer} is incomplete"));
        let block = model.blocks().get(layer).ok_or_else(missing)?;
        let group = |kinds: &[LinearKind]| {
            let linear = |kind: &LinearKind| {
                let (weight, bias) = block.linear(*kind).ok_or_else(missing)?;
                let bias = bias.map(values).transpose()?;
                let (out, inner) = weight.dims2()?;
                Ok(SamplerLinear { kind: *kind, weight: readable(weight)?, bias, out, inner })
            };
            let linears = kinds.iter().map(linear).collect::<Result<Vec<_>>>()?;
            let inner = linears.first().map_or(0, |linear| linear.inner);
            let outputs = linears.iter().map(|linear| linear.out).sum();
            let roundings = linears.iter().map(|l| InputRounding::of(&l.weight, model.compute()));
            let rounding = InputRounding::of_all(roundings);
            Ok::<_, SamplerError>(LinearGroup { linears, inner, outputs, rounding })
        };
        let norms = |[a, b]: &[Tensor; 2]| -> Result<_> {
            Ok([norm_weight(a, spec)?, norm_weight(b, spec)?])
        };
        let (qkv, gate_up): (&[_], &[_]) = if spec.fused {
            (&[LinearKind::QkvProj], &[LinearKind::GateUpProj])
        } else {
            let qkv = &[LinearKind::QProj, LinearKind::KProj, LinearKind::VProj];
            (qkv, &[LinearKind::GateProj, LinearKind::UpProj])
        };
        Ok(Self {
            norms: norms(&block.norms)?,
            output_norms: block.output_norms.as_ref().map(norms).transpose()?,
            head_norms: block.head_norms.as_ref().map(norms).transpose()?,
            qkv: group(qkv)?,
            o: group(&[LinearKind::OProj])?,
            gate_up: group(gate_up)?,
            down: group(&[LinearKind::DownProj])?,
            rope: spec.layers.get(layer).is_some_and(|layer| layer.rope),
            options: spec.attention_options(layer),
        })
    }
}

impl SamplerLinear {
    /// Computes consecutive outputs from `first` on, with the bias, as many as `out` `[outputs, width]`
    /// has.
    pub fn forward(&self, out: &mut [f32], first: usize, x: LinearInput<'_>) -> Result<()> {
        multiply_stored(out, &self.weight, first, self.bias.as_deref(), x)
    }
}

/// Returns the matrix if [`multiply_stored`] can read it.
fn readable(matrix: &BaseMatrix) -> Result<BaseMatrix> {
    if let BaseMatrix::Float(tensor) = matrix {
        let (dtype, device) = (tensor.dtype(), tensor.device());
        let read = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        if !read || !device.is_cpu() || !tensor.is_contiguous() {
            let reason = format!("a tensor is {dtype:?} on {device:?}, or not contiguous");
            return Err(SamplerError::Weights(reason));
        }
    }
    Ok(matrix.clone())
}

/// Computes `out = w x + bias` on the current thread, where `w` are the rows of `weight` `[outputs, inner]`
/// from `first` on, as many as `out` `[outputs, width]` has. `bias` has a value for each row of `weight`.
fn multiply_stored(
    out: &mut [f32],
    weight: &BaseMatrix,
    first: usize,
    bias: Option<&[f32]>,
    x: LinearInput<'_>,
) -> Result<()> {
    let ((_, inner), columns) = (weight.dims2()?, x.columns);
    if let (BaseMatrix::Quantized(blocks), Some(integers)) = (weight, x.integers) {
        integer::product(out, columns.width, (blocks, first), bias, integers);
        return Ok(());
    }
    match bias {
        None => out.fill(0.0),
        Some(bias) => {
            let rows = out.chunks_exact_mut(columns.width).zip(&bias[first..]);
            rows.for_each(|(row, bias)| row.fill(*bias));
        }
    }
    let range = first * inner..(first + out.len() / columns.width) * inner;
    with_stored(weight, range, "decoder", |stored| {
        match (stored, x.bf16) {
            (StoredValues::Wide(storage, range), _) => {
                let values = &f32::cpu_storage_as_slice(storage)?[range];
                add_matmul_serial(out, WeightMatrix { values, inner }, columns);
            }
            (StoredValues::F16(values), _) => {
                add_matmul_serial(out, WeightMatrix { values, inner }, columns);
            }
            (StoredValues::Bf16(values), Some(x)) => {
                bf16::add_product(out, WeightMatrix { values, inner }, x);
            }
            (StoredValues::Bf16(values), None) => {
                add_matmul_serial(out, WeightMatrix { values, inner }, columns);
            }
            (StoredValues::Quantized(blocks, _), _) => {
                candle_core::bail!("the input of {blocks:?} is not rounded to integers")
            }
        }
        Ok(())
    })?;
    Ok(())
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}

/// A norm's factors: its weight plus the model's offset.
fn norm_weight(weight: &Tensor, spec: &ModelSpec) -> Result<Vec<f32>> {
    let mut weight = values(weight)?;
    weight.iter_mut().for_each(|w| *w += spec.norm_offset as f32);
    Ok(weight)
}

/// Outputs that the second factor of an adapter is divided by.
pub(crate) const PANEL: usize = 64;

/// The factors of one adapted linear layer: `delta(x) = b (a x)`. They are transposed, so that vectors along ranks and
/// outputs are read in order for a single token.
pub(crate) struct AdapterPair {
    kind: LinearKind,
    pub r: usize,
    /// `[in, r]`
    pub a: Vec<f32>,
    /// Panels of [`PANEL`] outputs, and of the rest: each `[r, outputs]`.
    b: Vec<f32>,
    /// The factor of the delta that `b` does not contain.
    scale: f32,
}

impl AdapterPair {
    /// The panel with an output: its first output, how many there are, and the values.
    pub fn panel(&self, output: usize) -> (usize, usize, &[f32]) {
        let first = output / PANEL * PANEL;
        let values = &self.b[first * self.r..];
        let values = &values[..values.len().min(PANEL * self.r)];
        (first, values.len() / self.r, values)
    }
}

/// Transposes each panel of [`PANEL`] rows of `[rows, columns]`, and the rest; with `back`, does the reverse.
fn transpose_panels(values: &[f32], columns: usize, back: bool) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    let size = (PANEL * columns).max(1);
    for (out, x) in out.chunks_mut(size).zip(values.chunks(size)) {
        let rows = x.len() / columns;
        match back {
            false => transpose_strided((out, rows), (x, columns), (rows, columns)),
            true => transpose_strided((out, columns), (x, rows), (columns, rows)),
        }
    }
    out
}

/// A copy of a LoRA adapter. Training the original further does not change it.
pub struct AdapterWeights {
    layers: Vec<Vec<AdapterPair>>,
    pub(crate) rank: usize,
}

impl AdapterWeights {
    /// Copies an adapter for passes on the processor, whose second factors contain the scale.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn new(spec: &ModelSpec, lora: &LoraWeights) -> Result<Self> {
        let mut adapter = Self::unscaled(spec, lora)?;
        for AdapterPair { b, scale, .. } in adapter.layers.iter_mut().flatten() {
            b.iter_mut().for_each(|b| *b *= *scale);
            *scale = 1.0;
        }
        Ok(adapter)
    }

    /// Copies an adapter for the slots of a device, which hold the values of its file, rounded once: those that the trainer's
    /// passes compute with, whatever the scale is.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub(crate) fn unscaled(spec: &ModelSpec, lora: &LoraWeights) -> Result<Self> {
        let mut layers = Vec::with_capacity(spec.num_layers);
        for layer in 0..spec.num_layers {
            let mut pairs = Vec::new();
            for (kind, _) in spec.linears(layer) {
                let Some(pair) = lora.pair(layer, kind) else { continue };
                let (r, inner) = pair.a.dims2()?;
                let b = transpose_panels(&values(pair.b.as_tensor())?, r, false);
                let mut a = vec![0.0; r * inner];
                transpose_strided((&mut a, r), (&values(pair.a.as_tensor())?, inner), (r, inner));
                pairs.push(AdapterPair { kind, r, a, b, scale: pair.scale as f32 });
            }
            layers.push(pairs);
        }
        let ranks = layers.iter().flatten().map(|pair: &AdapterPair| pair.r);
        let rank = ranks.max().unwrap_or(0);
        Ok(Self { layers, rank })
    }

    /// The values in the order of a layout, whose scales may be others. Where the layout has a greater rank, the other
    /// values are 0.
    pub(crate) fn values(&self, layout: &AdapterLayout) -> Result<Vec<f32>> {
        let mut values = vec![0.0; layout.values];
        for (layer, pairs) in self.layers.iter().enumerate() {
            for AdapterPair { kind, r, a, b, scale: own } in pairs {
                let module = kind.module(layer);
                let (inner, outputs) = (a.len() / r, b.len() / r);
                let places = layout.places.get(&module).zip(layout.scale(&module));
                let fit = |([of_a, of_b], _): &(&[Range<usize>; 2], f32)| {
                    of_a.len() >= a.len() && of_b.len() * inner == of_a.len() * outputs
                };
                let places = places.filter(fit);
                let ([of_a, of_b], scale) = places.ok_or(SamplerError::OtherAdapter(module))?;
                transpose_strided((&mut values[of_a.clone()], inner), (a, *r), (inner, *r));
                let rows = values[of_b.clone()].chunks_exact_mut(of_b.len() / outputs);
                for (row, b) in rows.zip(transpose_panels(b, *r, true).chunks_exact(*r)) {
                    // Without an effect if the layout's scale is 0. Equal scales leave all bits.
                    let factor = if scale == 0.0 { 0.0 } else { own / scale };
                    row.iter_mut().zip(b).for_each(|(x, b)| *x = b * factor);
                }
            }
        }
        Ok(values)
    }

    /// The factors of one linear layer, if it is adapted.
    pub(crate) fn get(&self, layer: usize, kind: LinearKind) -> Option<&AdapterPair> {
        self.layers.get(layer)?.iter().find(|pair| pair.kind == kind)
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use candle_core::Device;
    use hone_core::testing::skip_without;
    use hone_engine::ModelDir;
    use hone_model::adapter::{BaseDtype, LoraConfig, peft};
    use hone_model::device::{adapter_modules, adapter_values, decoder_shape, planned_modules};
    use hone_model::testing::{randomize, tiny_spec};
    use hone_model::weights::{LoadOptions, Quantize};
    use hone_model::{Model, ModelSpec};
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::testing::{DecoderHarness, family, ids, model, random_lora, trainer_logits};

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gguf").join(name)
    }

    /// Logits of a sequence, with an adapter.
    fn logits(model: &Model) -> Vec<Vec<f32>> {
        let lora = random_lora(model.spec(), 4, 7);
        let vocab = model.spec().vocab_size;
        DecoderHarness::new(model, Some(&lora)).decode_alone(&ids(19, vocab, 1), &ids(5, vocab, 2))
    }

    #[test]
    fn quantized_weights_give_the_logits_of_their_values_in_f32() {
        for name in ["llama-k.gguf", "qwen2-q8_0.gguf", "llama2-q4_0.gguf", "qwen2-q4_1.gguf"] {
            let dir = ModelDir::open(&fixture(name)).unwrap();
            let spec = ModelSpec::from_config(&dir.config).unwrap();
            let load = |dtype: BaseDtype| {
                Model::load(spec.clone(), &dir.weights, dtype, &Device::Cpu).unwrap()
            };
            let (small, wide) = (load(BaseDtype::Auto), load(BaseDtype::Float32));
            assert!(matches!(small.head(), BaseMatrix::Quantized(_)));
            let found = logits(&small);
            assert_close(name, &found, &logits(&wide), 2e-4);
            let lora = random_lora(&spec, 4, 7);
            let all = [ids(19, spec.vocab_size, 1), ids(5, spec.vocab_size, 2)].concat();
            assert_close(name, &found, &trainer_logits(&small, &all, Some(&lora))[18..], 2e-4);
        }
    }

    #[test]
    fn activations_in_bf16_change_logits_by_less_than_two_hundredths() {
        if !has_fast_bf16_vectors() {
            return skip_without("fast products in bf16");
        }
        for name in ["llama3", "phi3-longrope"] {
            let exact = model(&family(name));
            let rounded = exact.clone().with_compute(Compute::Bf16);
            let dtypes =
                [&exact, &rounded].map(|m| BaseWeights::new(m).unwrap().rounding().dtype());
            assert_eq!(dtypes, ["f32", "bf16"], "{name}");
            let (found, expected) = (logits(&rounded), logits(&exact));
            assert_ne!(found, expected);
            assert_close(name, &found, &expected, 2e-2);
        }
        // Weights of other types are multiplied as before.
        let exact = model(&family("mistral"));
        assert_eq!(logits(&exact.clone().with_compute(Compute::Bf16)), logits(&exact));
    }

    #[test]
    fn a_slot_has_the_values_of_the_file() {
        let spec = tiny_spec();
        let (shape, folder) = (decoder_shape(&spec, 64), tempfile::tempdir().unwrap());
        for (r, alpha) in [(4, 3.0), (3, 7.0), (7, 0.3)] {
            let config = LoraConfig { r, alpha, ..LoraConfig::default() };
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            let lora = LoraWeights::fresh(&spec, &config, &mut rng, DType::F32, &Device::Cpu);
            let lora = lora.unwrap();
            randomize(&lora, 2);
            let layout = AdapterLayout::new(&shape, &adapter_modules(&lora)).unwrap();
            let expected = adapter_values(&lora, &layout).unwrap();
            let dir = folder.path().join(r.to_string());
            peft::write(&dir, &lora, &config, "tiny").unwrap();
            let (_, read) = peft::read(&dir, &spec, DType::F32, &Device::Cpu).unwrap();
            for lora in [&lora, &read] {
                let found = AdapterWeights::unscaled(&spec, lora).unwrap().values(&layout);
                assert_eq!(found.unwrap(), expected, "{alpha}");
            }
            // Of a layout with twice the scale, the second factors are half as large.
            let twice = LoraConfig { alpha: 2.0 * alpha, ..config };
            let twice = planned_modules(&spec, &twice).unwrap();
            let layout = AdapterLayout::new(&shape, &twice).unwrap();
            let half = AdapterWeights::unscaled(&spec, &lora).unwrap().values(&layout).unwrap();
            for [of_a, of_b] in layout.places.values() {
                assert_eq!(half[of_a.clone()], expected[of_a.clone()]);
                let doubled: Vec<f32> = half[of_b.clone()].iter().map(|b| 2.0 * b).collect();
                assert_eq!(doubled, expected[of_b.clone()]);
            }
        }
    }

    /// Compares with a share of the largest logit. Activations of 16 bits change logits by about 1e-4 of it.
    fn assert_close(name: &str, found: &[Vec<f32>], expected: &[Vec<f32>], most: f32) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            let largest = expected.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            let pairs = found.iter().zip(expected);
            let error = pairs.fold(0.0_f32, |max, (a, b)| max.max((a - b).abs())) / largest;
            assert!(error < most, "{name}: {error:e}");
        }
    }

    #[test]
    fn bytes_of_a_step_are_those_of_the_stored_matrices() {
        let dir = ModelDir::open(&family("llama3")).unwrap();
        let spec = ModelSpec::from_config(&dir.config).unwrap();
        let bytes = |quantize| {
            let options = LoadOptions { quantize, ..LoadOptions::default() };
            let model = Model::load(spec.clone(), &dir.weights, options, &Device::Cpu).unwrap();
            BaseWeights::new(&model).unwrap().bytes
        };
        let matrices = spec.weight_shapes().into_iter().map(|(_, shape)| shape);
        let held = matrices.map(|shape| match shape[..] {
            // Rows of 40 values are not whole blocks.
            [rows, 40] => [rows * 80; 2],
            [rows, columns] => [rows * columns * 2, rows * columns / 32 * 34],
            _ => [0; 2],
        });
        let [half, eight] = held.fold([0; 2], |sum, held| [sum[0] + held[0], sum[1] + held[1]]);
        assert_eq!([bytes(Quantize::None), bytes(Quantize::Q8_0)], [half, eight]);
    }
}
