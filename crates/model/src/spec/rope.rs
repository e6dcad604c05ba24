//! Rotary position embedding (Su et al. 2021): which angles each position turns by.

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

use super::fields::{get, number, number_or, numbers, optional_number, size, size_or};
use crate::{ModelError, ModelSpec, Result};

/// Rotary positions of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// How many values of a head are turned, from the first; even. The others pass unchanged.
    pub rotary_dim: usize,
    /// What is done to the frequencies.
    pub scaling: RopeScaling,
}

/// Ways to stretch a context, as transformers' `modeling_rope_utils` names them.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// `default`: nothing.
    Default,
    /// `linear`: every frequency divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// `llama3`: low frequencies divided by `factor`, high ones kept, those between interpolated.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are low.
        low: f64,
        /// Wavelengths below `original / high` are high.
        high: f64,
        /// Context length before it was stretched, in tokens.
        original: usize,
    },
    /// `longrope`: each frequency divided by its own factor, cosines and sines multiplied by one.
    /// Only the factors for sequences up to `original` tokens are used; longer ones take another set
    /// for *all* their positions, and are refused ([`ModelSpec::check_length`]).
    Long {
        /// Divisors, one a frequency (`short_factor`).
        factors: Vec<f64>,
        /// What cosines and sines are multiplied by.
        attention_factor: f64,
        /// Sequences of up to this many tokens take these factors.
        original: usize,
    },
}

impl RopeSpec {
    /// Reads `rope_parameters` (transformers 5) or `rope_scaling`, `rope_theta` and
    /// `partial_rotary_factor` (transformers 4).
    pub(crate) fn from_config(
        config: &Value,
        head_dim: usize,
        default_theta: f64,
        phi3: bool,
    ) -> Result<Self> {
        // As transformers: `rope_scaling` wins over `rope_parameters`, an empty one counts as none.
        let filled =
            |field| get(config, field).filter(|v| v.as_object().is_none_or(|m| !m.is_empty()));
        let (field, rope) = match (filled("rope_scaling"), filled("rope_parameters")) {
            (Some(rope), _) => ("rope_scaling", rope.clone()),
            (None, Some(rope)) => ("rope_parameters", rope.clone()),
            (None, None) => ("rope_parameters", Value::Object(serde_json::Map::new())),
        };
        let nested = rope.as_object().is_none_or(|map| map.values().any(Value::is_object));
        if nested {
            return Err(ModelError::Unsupported(format!(
                "config.json: `{field}` is {rope}, but only one set of rotary parameters for all \
                 layers is supported"
            )));
        }
        let theta = match optional_number(&rope, "rope_theta")? {
            Some(theta) => theta,
            None => number_or(config, "rope_theta", default_theta)?,
        };
        let partial = match optional_number(&rope, "partial_rotary_factor")? {
            Some(partial) => partial,
            None => number_or(config, "partial_rotary_factor", 1.0)?,
        };
        let rotary_dim = (head_dim as f64 * partial) as usize;
        let partial_fits = rotary_dim == head_dim || (phi3 && rotary_dim < head_dim);
        if !partial_fits || rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            return Err(ModelError::Spec {
                field: "partial_rotary_factor",
                value: partial.to_string(),
                expected: if phi3 {
                    "a share of the head's width that is an even number of values"
                } else {
                    "1 for this architecture"
                },
            });
        }
        let kind = get(&rope, "rope_type").or_else(|| get(&rope, "type"));
        let scaling = match kind.and_then(Value::as_str) {
            Some("default") => RopeScaling::Default,
            None if kind.is_none() => RopeScaling::Default,
            Some("linear") => RopeScaling::Linear { factor: number(&rope, "factor")? },
            Some("llama3") => llama3(config, &rope)?,
            Some("longrope") => long(config, &rope, rotary_dim, phi3)?,
            Some("su") if phi3 => long(config, &rope, rotary_dim, phi3)?,
            _ => {
                return Err(ModelError::Unsupported(format!(
                    "config.json: `{field}` has rope_type {}; supported: default, linear, llama3, \
                     longrope",
                    kind.unwrap_or(&Value::Null)
                )));
            }
        };
        Ok(Self { theta, rotary_dim, scaling })
    }

    /// What cosines and sines are multiplied by.
    pub fn attention_factor(&self) -> f64 {
        match &self.scaling {
            RopeScaling::Long { attention_factor, .. } => *attention_factor,
            _ => 1.0,
        }
    }
}

fn llama3(config: &Value, rope: &Value) -> Result<RopeScaling> {
    let (low, high) = (number(rope, "low_freq_factor")?, number(rope, "high_freq_factor")?);
    if low >= high {
        return Err(ModelError::Spec {
            field: "high_freq_factor",
            value: high.to_string(),
            expected: "more than `low_freq_factor`",
        });
    }
    let original = original_length(config, rope, "max_position_embeddings")?;
    Ok(RopeScaling::Llama3 { factor: number(rope, "factor")?, low, high, original })
}

/// Context length before it was stretched: at the top level, else among the rotary parameters, else
/// of another field.
fn original_length(config: &Value, rope: &Value, otherwise: &'static str) -> Result<usize> {
    const FIELD: &str = "original_max_position_embeddings";
    match [config, rope].into_iter().find(|place| get(place, FIELD).is_some()) {
        Some(place) => size(place, FIELD),
        None => size(config, otherwise),
    }
}

fn long(config: &Value, rope: &Value, rotary_dim: usize, phi3: bool) -> Result<RopeScaling> {
    // Phi-3's configuration has a default of its own, which wins over the rotary parameters.
    let original = if phi3 {
        size_or(config, "original_max_position_embeddings", 4096)?
    } else {
        original_length(config, rope, "max_position_embeddings")?
    };
    let factors = numbers(rope, "short_factor")?;
    if factors.len() != rotary_dim / 2 {
        return Err(ModelError::Spec {
            field: "short_factor",
            value: format!("a list of {}", factors.len()),
            expected: "one factor for every two values of a head that are turned",
        });
    }
    let factor = match optional_number(rope, "factor")? {
        Some(factor) => factor,
        None => {
            let max = size_or(config, "max_position_embeddings", original)?;
            max as f64 / original as f64
        }
    };
    let attention_factor = match optional_number(rope, "attention_factor")? {
        Some(given) => given,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
    };
    Ok(RopeScaling::Long { factors, attention_factor, original })
}

/// Angle per position of each turned pair of a head, in radians: `rotary_dim / 2` numbers,
/// `theta^(-2i / rotary_dim)` before scaling. Rounded to f32 after each step, as transformers
/// computes them (`modeling_rope_utils`).
pub fn rope_frequencies(spec: &ModelSpec) -> Vec<f32> {
    let rope = &spec.rope;
    let powers = (0..rope.rotary_dim).step_by(2).map(|i| {
        let exponent = i as f32 / rope.rotary_dim as f32;
        rope.theta.powf(f64::from(exponent)) as f32
    });
    match &rope.scaling {
        RopeScaling::Default => powers.map(|power| 1.0 / power).collect(),
        RopeScaling::Linear { factor } => {
            powers.map(|power| 1.0 / power / *factor as f32).collect()
        }
        RopeScaling::Long { factors, .. } => {
            powers.zip(factors).map(|(power, factor)| 1.0 / (*factor as f32 * power)).collect()
        }
        RopeScaling::Llama3 { factor, low, high, original } => {
            let (factor, original) = (*factor as f32, *original as f64);
            let (longest, shortest) = ((original / low) as f32, (original / high) as f32);
            let stretch = |frequency: f32| {
                let wavelength = std::f64::consts::TAU as f32 / frequency;
                if wavelength > longest {
                    frequency / factor
                } else if wavelength < shortest {
                    frequency
                } else {
                    let turns = original as f32 / wavelength;
                    let smooth = (turns - *low as f32) / (high - low) as f32;
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            };
            powers.map(|power| stretch(1.0 / power)).collect()
        }
    }
}

/// Cosines and sines at every position, each `[positions.len(), frequencies.len()]`, multiplied by
/// the attention factor. Angles are rounded to f32 as transformers and mistral.rs compute them.
///
/// # Errors
/// If a tensor cannot be made.
pub fn rope_tables(
    positions: &[usize],
    frequencies: &[f32],
    attention_factor: f64,
    dtype: DType,
    device: &Device,
) -> candle_core::Result<(Tensor, Tensor)> {
    let half = frequencies.len();
    let count = positions.iter().max().map_or(0, |last| last + 1);
    let angles: Vec<(f64, f64)> = (0..count)
        .flat_map(|p| frequencies.iter().map(move |f| f64::from(p as f32 * f).sin_cos()))
        .map(|(sin, cos)| (cos * attention_factor, sin * attention_factor))
        .collect();
    let table = |part: fn(&(f64, f64)) -> f64| {
        let rows = positions.iter().flat_map(|p| angles[p * half..][..half].iter().map(part));
        let shape = (positions.len(), half);
        if dtype == DType::F32 {
            Tensor::from_vec(rows.map(|x| x as f32).collect::<Vec<_>>(), shape, device)
        } else {
            Tensor::from_vec(rows.collect::<Vec<_>>(), shape, device)?.to_dtype(dtype)
        }
    };
    Ok((table(|angle| angle.0)?, table(|angle| angle.1)?))
}
