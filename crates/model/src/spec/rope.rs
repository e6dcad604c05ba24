//! Rotary position embedding (Su et al. 2021): the angles of each position.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

use super::fields::{get, invalid, number, number_or, numbers, optional_number, size, size_or};
use crate::{ModelError, Result};

/// Rotary position embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// Values of a head that are rotated, from the first; even. The others are unchanged.
    pub rotary_dim: usize,
    /// The scaling of the frequencies.
    pub scaling: RopeScaling,
}

/// Scalings of the frequencies for longer contexts, as named in transformers' `modeling_rope_utils`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// `default`: no scaling.
    Default,
    /// `linear`: every frequency divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// `llama3`: low frequencies divided by `factor`, high ones unchanged, those between interpolated.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` have low frequencies.
        low: f64,
        /// Wavelengths below `original / high` have high frequencies.
        high: f64,
        /// Context length before scaling, in tokens.
        original: usize,
    },
    /// `longrope`: each frequency divided by its own factor, cosines and sines multiplied by one factor.
    /// Longer sequences than `original` have other factors at *all* their positions; they are rejected
    /// ([`ModelSpec::check_length`](crate::ModelSpec::check_length)).
    Long {
        /// One divisor per frequency (`short_factor`).
        factors: Vec<f64>,
        /// Factor of cosines and sines.
        attention_factor: f64,
        /// Sequences of up to this many tokens have these factors.
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
        // As in transformers: `rope_scaling` overrides `rope_parameters`; an empty one counts as absent.
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
        let number_in_either = |field, default| match optional_number(&rope, field)? {
            Some(number) => Ok(number),
            None => number_or(config, field, default),
        };
        let theta = number_in_either("rope_theta", default_theta)?;
        let partial = number_in_either("partial_rotary_factor", 1.0)?;
        let rotary_dim = (head_dim as f64 * partial) as usize;
        let partial_fits = rotary_dim == head_dim || (phi3 && rotary_dim < head_dim);
        if !partial_fits || rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            let expected = match phi3 {
                true => "a share of the head's width that is an even number of values",
                false => "1 for this architecture",
            };
            return Err(invalid("partial_rotary_factor", partial, expected));
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

    /// Factor of cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        match &self.scaling {
            RopeScaling::Long { attention_factor, .. } => *attention_factor,
            _ => 1.0,
        }
    }

    /// Angle per position of each rotated pair of a head, in radians: `rotary_dim / 2` numbers,
    /// `theta^(-2i / rotary_dim)` before scaling. Rounded to f32 after each step, as in transformers
    /// (`modeling_rope_utils`).
    pub fn frequencies(&self) -> Vec<f32> {
        let powers = (0..self.rotary_dim).step_by(2).map(|i| {
            let exponent = i as f32 / self.rotary_dim as f32;
            self.theta.powf(f64::from(exponent)) as f32
        });
        match &self.scaling {
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
                let scaled = |frequency: f32| {
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
                powers.map(|power| scaled(1.0 / power)).collect()
            }
        }
    }
}

fn llama3(config: &Value, rope: &Value) -> Result<RopeScaling> {
    let (low, high) = (number(rope, "low_freq_factor")?, number(rope, "high_freq_factor")?);
    if low >= high {
        return Err(invalid("high_freq_factor", high, "more than `low_freq_factor`"));
    }
    let original = original_length(config, rope)?;
    Ok(RopeScaling::Llama3 { factor: number(rope, "factor")?, low, high, original })
}

/// Context length before scaling: at the top level, else in the rotary parameters, else the context
/// length itself.
fn original_length(config: &Value, rope: &Value) -> Result<usize> {
    const FIELD: &str = "original_max_position_embeddings";
    match [config, rope].into_iter().find(|place| get(place, FIELD).is_some()) {
        Some(place) => size(place, FIELD),
        None => size(config, "max_position_embeddings"),
    }
}

fn long(config: &Value, rope: &Value, rotary_dim: usize, phi3: bool) -> Result<RopeScaling> {
    // The default of Phi-3's configuration class overrides the rotary parameters.
    let original = if phi3 {
        size_or(config, "original_max_position_embeddings", 4096)?
    } else {
        original_length(config, rope)?
    };
    let factors = numbers(rope, "short_factor")?;
    if factors.len() != rotary_dim / 2 {
        let expected = "one factor for every two rotated values of a head";
        return Err(invalid("short_factor", format!("a list of {}", factors.len()), expected));
    }
    let factor = match optional_number(rope, "factor")? {
        Some(factor) => factor,
        None => size_or(config, "max_position_embeddings", original)? as f64 / original as f64,
    };
    let attention_factor = match optional_number(rope, "attention_factor")? {
        Some(factor) => factor,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
    };
    Ok(RopeScaling::Long { factors, attention_factor, original })
}

/// Cosines and sines of a model's angles, multiplied by the attention factor, which are computed once.
/// Angles are rounded to f32, as in transformers and mistral.rs.
#[derive(Debug)]
pub(crate) struct RopeTables {
    rope: RopeSpec,
    dtype: DType,
    device: Device,
    /// Of the positions from 0 on that passes have had, each `[positions, rotary_dim / 2]`.
    tables: Mutex<Option<(Tensor, Tensor)>>,
}

impl RopeTables {
    pub fn new(rope: &RopeSpec, dtype: DType, device: &Device) -> Self {
        Self { rope: rope.clone(), dtype, device: device.clone(), tables: Mutex::new(None) }
    }

    /// Cosines and sines at these positions, each `[positions.len(), rotary_dim / 2]`.
    pub fn at(&self, positions: &[usize]) -> candle_core::Result<(Tensor, Tensor)> {
        let count = positions.iter().max().map_or(1, |last| last + 1);
        let (cos, sin) = self.first(count)?;
        let rows: Vec<u32> = positions.iter().map(|position| *position as u32).collect();
        let rows = Tensor::from_vec(rows, positions.len(), &self.device)?;
        Ok((cos.index_select(&rows, 0)?, sin.index_select(&rows, 0)?))
    }

    /// Tables of at least the first `count` positions.
    fn first(&self, count: usize) -> candle_core::Result<(Tensor, Tensor)> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tables) = &*tables
            && tables.0.dim(0)? >= count
        {
            return Ok(tables.clone());
        }
        let grown = self.compute(count.next_power_of_two())?;
        Ok(tables.insert(grown).clone())
    }

    fn compute(&self, count: usize) -> candle_core::Result<(Tensor, Tensor)> {
        let (frequencies, factor) = (self.rope.frequencies(), self.rope.attention_factor());
        let angle = |p| frequencies.iter().map(move |f| f64::from(p as f32 * f).sin_cos());
        let (sines, cosines): (Vec<f64>, Vec<f64>) =
            (0..count).flat_map(angle).map(|(sin, cos)| (sin * factor, cos * factor)).unzip();
        let table = |values| {
            Tensor::from_vec(values, (count, frequencies.len()), &self.device)?.to_dtype(self.dtype)
        };
        Ok((table(cosines)?, table(sines)?))
    }
}
