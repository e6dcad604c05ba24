//! A decoder's shape, and its weights and adapter in device memory.
//!
//! Linear layers that read the same input are one matrix: q, k and v, and gate and up. Their adapters have their A
//! in one matrix, too, so that a pass has one product for all of them.

use std::collections::BTreeMap;
use std::ops::Range;

use half::bf16;

use crate::arena::ArenaRegion;
use crate::error::{GpuError, Result};
use crate::kernels::DeviceFloat;
use crate::products::DeviceMatrix;

/// The shape of a decoder and the options of its layers, as `hone-model` describes them.
#[derive(Clone, Debug, Default)]
pub struct DecoderShape {
    /// Logits per position.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the gated MLP.
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub key_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Pairs of a head's values that are rotated.
    pub rotated_pairs: usize,
    /// Positions in the tables of cosines and sines.
    pub positions: usize,
    /// For each layer whether it rotates, and its window; 0 if there is none.
    pub layers: Vec<(bool, usize)>,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Added to the weights of norms.
    pub norm_offset: f32,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has one.
    pub output_bias: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// Whether q, k and v are one linear layer of the files and of adapters, and gate and up another.
    pub is_fused: bool,
    /// Whether queries and keys pass a norm.
    pub head_norms: bool,
    /// Whether the outputs of attention and MLP pass a norm.
    pub output_norms: bool,
    /// The approximation of GELU by a tanh in place of SiLU.
    pub is_gelu: bool,
    /// Whether the output layer's weight is the embedding's.
    pub is_tied: bool,
    /// Factor of the embedding's output.
    pub embedding_scale: f32,
    /// Factor of the attention scores.
    pub attention_scale: f32,
    /// Soft cap of the attention scores; 0 if there is none.
    pub attention_softcap: f32,
    /// Soft cap of the logits; 0 if there is none.
    pub final_softcap: f32,
}

/// Gives a region of this name and number of bytes an address.
pub(crate) type Allocate<'a> = &'a mut dyn FnMut(&str, u64) -> Result<u64>;

/// Linear layers that read the same input.
struct StackedLinear {
    name: &'static str,
    input: usize,
    has_bias: bool,
    /// The name of each below the layer, and its outputs.
    modules: Vec<(&'static str, usize)>,
}

/// Index of q, k and v in [`LayerWeights::projections`].
pub(crate) const QKV: usize = 0;
/// Index of the attention's output projection.
pub(crate) const OUTPUT: usize = 1;
/// Index of gate and up.
pub(crate) const GATE_UP: usize = 2;
/// Index of the MLP's output projection.
pub(crate) const DOWN: usize = 3;

impl DecoderShape {
    /// Values of a token's queries, and of its keys or values.
    pub(crate) fn widths(&self) -> [usize; 2] {
        [self.heads * self.head_dim, self.key_heads * self.head_dim]
    }

    /// Values of a token's queries, keys and values.
    pub(crate) fn qkv(&self) -> usize {
        let [q, k] = self.widths();
        q + 2 * k
    }

    fn linears(&self) -> [StackedLinear; 4] {
        let Self { hidden, intermediate, .. } = *self;
        let ([q, k], qkv) = (self.widths(), self.qkv());
        let (inputs, gates) = match self.is_fused {
            true => {
                (vec![("self_attn.qkv_proj", qkv)], vec![("mlp.gate_up_proj", 2 * intermediate)])
            }
            false => (
                vec![("self_attn.q_proj", q), ("self_attn.k_proj", k), ("self_attn.v_proj", k)],
                vec![("mlp.gate_proj", intermediate), ("mlp.up_proj", intermediate)],
            ),
        };
        let (output, down) = (vec![("self_attn.o_proj", hidden)], vec![("mlp.down_proj", hidden)]);
        let stacked =
            |(name, input, has_bias, modules)| StackedLinear { name, input, has_bias, modules };
        [
            ("qkv", hidden, self.qkv_bias, inputs),
            ("output", q, self.output_bias, output),
            ("gate_up", hidden, self.mlp_bias, gates),
            ("down", intermediate, self.mlp_bias, down),
        ]
        .map(stacked)
    }

    /// Names of the norms before attention and MLP, and of those of their outputs.
    fn norm_names(&self) -> ([&'static str; 2], Option<[&'static str; 2]>) {
        match self.output_norms {
            true => (
                ["input_layernorm", "pre_feedforward_layernorm"],
                Some(["post_attention_layernorm", "post_feedforward_layernorm"]),
            ),
            false => (["input_layernorm", "post_attention_layernorm"], None),
        }
    }
}

/// Linear layers with the same input, in device memory.
#[derive(Debug)]
pub(crate) struct Projection {
    /// `[outputs, inputs]`
    pub weight: DeviceMatrix,
    /// Address, or 0.
    pub bias: u64,
}

#[derive(Debug)]
pub(crate) struct LayerWeights {
    /// Addresses of the norms' weights before attention and MLP.
    pub norms: [u64; 2],
    /// Of those of their outputs.
    pub output_norms: Option<[u64; 2]>,
    /// Of those of queries and keys; 0 if there are none.
    pub head_norms: [u64; 2],
    pub projections: [Projection; 4],
}

/// Where a weight of the files belongs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightPlace {
    pub region: ArenaRegion,
    pub float: DeviceFloat,
}

/// A model in device memory.
#[derive(Debug)]
pub(crate) struct DecoderWeights {
    pub embedding: u64,
    /// `[vocab, hidden]`
    pub head: DeviceMatrix,
    pub norm: u64,
    pub cosines: u64,
    pub sines: u64,
    pub layers: Vec<LayerWeights>,
    /// By Hugging Face name, and the tables of angles as `cosines` and `sines`.
    pub places: BTreeMap<String, WeightPlace>,
}

/// Allocates weights and remembers their places.
struct WeightAllocator<'a> {
    allocate: Allocate<'a>,
    /// The type of matrices, which enter products, and of biases, which are added to their results.
    float: DeviceFloat,
    places: BTreeMap<String, WeightPlace>,
}

impl WeightAllocator<'_> {
    fn weight(&mut self, name: &str, values: usize, float: DeviceFloat) -> Result<u64> {
        let bytes = values as u64 * float.bytes();
        let address = (self.allocate)(name, bytes)?;
        let region = ArenaRegion { address, bytes };
        self.places.insert(name.to_owned(), WeightPlace { region, float });
        Ok(address)
    }

    fn norm(&mut self, name: &str, width: usize) -> Result<u64> {
        self.weight(&format!("{name}.weight"), width, DeviceFloat::F32)
    }

    /// A region that consists of the weights of several modules; of each `width` values an output.
    fn stacked(
        &mut self,
        prefix: &str,
        linear: &StackedLinear,
        kind: &str,
        width: usize,
    ) -> Result<u64> {
        let StackedLinear { name, modules, .. } = linear;
        let bytes = |outputs: usize| (outputs * width) as u64 * self.float.bytes();
        let outputs = modules.iter().map(|module| module.1).sum();
        let address = (self.allocate)(&format!("{prefix}.{name}.{kind}"), bytes(outputs))?;
        let mut first = 0;
        for (module, outputs) in modules {
            let region = ArenaRegion { address: address + bytes(first), bytes: bytes(*outputs) };
            let place = WeightPlace { region, float: self.float };
            self.places.insert(format!("{prefix}.{module}.{kind}"), place);
            first += outputs;
        }
        Ok(address)
    }

    fn projection(&mut self, prefix: &str, linear: &StackedLinear) -> Result<Projection> {
        let outputs = linear.modules.iter().map(|module| module.1).sum();
        let weight = self.stacked(prefix, linear, "weight", linear.input)?;
        let weight = DeviceMatrix::new(weight, [outputs, linear.input], self.float);
        let bias = match linear.has_bias {
            true => self.stacked(prefix, linear, "bias", 1)?,
            false => 0,
        };
        Ok(Projection { weight, bias })
    }

    fn layer(&mut self, shape: &DecoderShape, prefix: &str) -> Result<LayerWeights> {
        let mut norms = |[first, second]: [&str; 2], width| -> Result<[u64; 2]> {
            let first = self.norm(&format!("{prefix}.{first}"), width)?;
            Ok([first, self.norm(&format!("{prefix}.{second}"), width)?])
        };
        let (inputs, outputs) = shape.norm_names();
        let (inputs, outputs) = (
            norms(inputs, shape.hidden)?,
            outputs.map(|names| norms(names, shape.hidden)).transpose()?,
        );
        let head_norms = match shape.head_norms {
            true => norms(["self_attn.q_norm", "self_attn.k_norm"], shape.head_dim)?,
            false => [0; 2],
        };
        let [qkv, output, gate_up, down] = shape.linears();
        let projections = [
            self.projection(prefix, &qkv)?,
            self.projection(prefix, &output)?,
            self.projection(prefix, &gate_up)?,
            self.projection(prefix, &down)?,
        ];
        Ok(LayerWeights { norms: inputs, output_norms: outputs, head_norms, projections })
    }
}

impl DecoderWeights {
    /// Gives every weight its place.
    pub fn new(shape: &DecoderShape, float: DeviceFloat, allocate: Allocate<'_>) -> Result<Self> {
        let mut all = WeightAllocator { allocate, float, places: BTreeMap::new() };
        let table = shape.vocab * shape.hidden;
        let embedding = all.weight("model.embed_tokens.weight", table, float)?;
        let head = match shape.is_tied {
            true => embedding,
            false => all.weight("lm_head.weight", table, float)?,
        };
        let norm = all.norm("model.norm", shape.hidden)?;
        let angles = shape.positions * shape.rotated_pairs;
        let cosines = all.weight("cosines", angles, DeviceFloat::F32)?;
        let sines = all.weight("sines", angles, DeviceFloat::F32)?;
        let layers = (0..shape.layers.len())
            .map(|index| all.layer(shape, &format!("model.layers.{index}")))
            .collect::<Result<_>>()?;
        let head = DeviceMatrix::new(head, [shape.vocab, shape.hidden], float);
        Ok(Self { embedding, head, norm, cosines, sines, layers, places: all.places })
    }
}

/// Host values of a weight.
#[derive(Clone, Copy, Debug)]
pub enum HostFloats<'a> {
    /// 32 bits.
    F32(&'a [f32]),
    /// 16 bits.
    Bf16(&'a [bf16]),
}

impl HostFloats<'_> {
    /// The bytes of the values in another type.
    pub(crate) fn bytes(self, float: DeviceFloat) -> Vec<u8> {
        match (self, float) {
            (Self::F32(x), DeviceFloat::F32) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
            (Self::F32(x), DeviceFloat::Bf16) => {
                x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect()
            }
            (Self::Bf16(x), DeviceFloat::F32) => {
                x.iter().flat_map(|x| x.to_f32().to_le_bytes()).collect()
            }
            (Self::Bf16(x), DeviceFloat::Bf16) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }
}

/// The adapter of one linear layer, whose output is `scale x A^T B^T`.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterModule {
    /// `model.layers.3.self_attn.q_proj`
    pub name: String,
    /// Rows of A `[rank, inputs]`, and columns of B `[outputs, rank]`.
    pub rank: usize,
    /// Factor of the output.
    pub scale: f32,
}

/// The adapter of one linear layer among those with the same input.
#[derive(Clone, Debug)]
pub(crate) struct AdapterPart {
    /// The linear layer's outputs among those of its projection.
    pub outputs: Range<usize>,
    /// Its rows of A.
    pub rows: Range<usize>,
    /// First value of B `[outputs, rank]`.
    pub b: usize,
    pub scale: f32,
}

/// The adapters of linear layers with the same input.
#[derive(Clone, Debug, Default)]
pub(crate) struct StackedAdapter {
    /// The sum of their ranks; 0 without an adapter.
    pub rank: usize,
    /// First value of A `[rank, inputs]`.
    pub a: usize,
    pub parts: Vec<AdapterPart>,
}

/// Places of all A and B in one buffer, which norms, updates and copies treat as a whole.
#[derive(Clone, Debug, Default)]
pub struct AdapterLayout {
    /// Values of the buffer. Those between matrices are 0.
    pub values: usize,
    /// A and B of each module.
    pub places: BTreeMap<String, [Range<usize>; 2]>,
    /// Of each layer's projections.
    pub(crate) stacked: Vec<[StackedAdapter; 4]>,
}

impl AdapterLayout {
    /// Matrices begin at multiples of this number of values, which suits cuBLASLt in both types.
    const ALIGNMENT: usize = 8;

    /// Gives every A and B its place.
    ///
    /// # Errors
    /// If the decoder does not have one of the modules, or a rank is 0.
    pub fn new(shape: &DecoderShape, modules: &[AdapterModule]) -> Result<Self> {
        let mut modules: BTreeMap<&str, &AdapterModule> =
            modules.iter().map(|module| (module.name.as_str(), module)).collect();
        let mut layout = Self::default();
        for index in 0..shape.layers.len() {
            let stacked = shape.linears().map(|linear| {
                let mut found = Vec::new();
                let mut outputs = 0..0;
                for (module, count) in linear.modules {
                    outputs = outputs.end..outputs.end + count;
                    let module = modules.remove(format!("model.layers.{index}.{module}").as_str());
                    found.extend(module.map(|module| (module, outputs.clone())));
                }
                let rank = found.iter().map(|(module, _)| module.rank).sum();
                let mut stacked = StackedAdapter { rank, a: layout.values, parts: Vec::new() };
                let mut rows = 0..0;
                layout.values += rank * linear.input;
                for (AdapterModule { name, rank, scale }, outputs) in found {
                    rows = rows.end..rows.end + rank;
                    let b = layout.values.next_multiple_of(Self::ALIGNMENT);
                    layout.values = b + outputs.len() * rank;
                    let [first, end] =
                        [rows.start, rows.end].map(|row| stacked.a + row * linear.input);
                    layout.places.insert(name.clone(), [first..end, b..layout.values]);
                    let (rows, scale) = (rows.clone(), *scale);
                    stacked.parts.push(AdapterPart { outputs, rows, b, scale });
                }
                layout.values = layout.values.next_multiple_of(Self::ALIGNMENT);
                stacked
            });
            layout.stacked.push(stacked);
        }
        if let Some(name) = modules.keys().next() {
            return Err(GpuError::Misuse(format!("no linear layer `{name}` for an adapter")));
        }
        match layout.places.iter().find(|(_, [a, _])| a.is_empty()) {
            Some((name, _)) => Err(GpuError::Misuse(format!("the adapter of {name} has rank 0"))),
            None => Ok(layout),
        }
    }
    /// The factor of a module's output.
    pub fn scale(&self, module: &str) -> Option<f32> {
        let [_, b] = self.places.get(module)?;
        let mut parts = self.stacked.iter().flatten().flat_map(|stacked| &stacked.parts);
        parts.find(|part| part.b == b.start).map(|part| part.scale)
    }
}
