//! Rotary scaling from the metadata and the tensors of a GGUF file.

use serde_json::{Value, json};

use super::super::values::{Config, get};
use super::metadata::{Metadata, decimal};
use crate::error::EngineError;

/// The divisors of Llama 3's scaling in all published models: low and high frequencies are those whose
/// wavelength is above or below the original context divided by these.
const LOW: f64 = 1.0;
const HIGH: f64 = 4.0;

/// Largest relative difference between a stored factor and the one of recovered parameters.
const TOLERANCE: f64 = 1e-4;

/// Adds `rope_scaling` to `config` if the file scales positions.
///
/// # Errors
/// If a value is wrong, or the factors are not those of a scaling that `config.json` can state.
pub(super) fn add_scaling(
    metadata: &Metadata<'_>,
    arch: &str,
    head_dim: u64,
    config: &mut Config,
) -> Result<(), EngineError> {
    let key = |name: &str| format!("{arch}.rope.scaling.{name}");
    let original = metadata.whole(&key("original_context_length"))?;
    let mut put = |key: &str, value: Value| drop(config.insert(key.to_owned(), value));
    if let Some(short) = metadata.vector("rope_factors_short.weight")? {
        let long = metadata.vector("rope_factors_long.weight")?.unwrap_or_default();
        let decimals = |factors: Vec<f32>| factors.into_iter().map(decimal).collect::<Vec<_>>();
        put(
            "rope_scaling",
            json!({
                "rope_type": "longrope",
                "short_factor": decimals(short),
                "long_factor": decimals(long),
            }),
        );
        if let Some(original) = original {
            put("original_max_position_embeddings", json!(original));
        }
        return Ok(());
    }
    if let Some(factors) = metadata.vector("rope_freqs.weight")? {
        let theta = get(config, "rope_theta").as_f64().unwrap_or(10_000.0);
        if factors.iter().all(|factor| *factor == 1.0) {
            return Ok(());
        }
        let found = llama3(&factors, theta, head_dim as f64).ok_or_else(|| {
            metadata.refuse("rope_freqs.weight has factors of another scaling than Llama 3's")
        })?;
        config.insert("rope_scaling".to_owned(), found);
        return Ok(());
    }
    match metadata.text(&key("type"))? {
        None | Some("none") => {}
        Some(kind) => {
            let factor = metadata.number(&key("factor"))?;
            put("rope_scaling", json!({ "rope_type": kind, "factor": factor }));
        }
    }
    Ok(())
}

/// The factor of the frequency with this wavelength, in tokens.
fn llama3_factor(wavelength: f64, factor: f64, original: f64) -> f64 {
    if wavelength < original / HIGH {
        1.0
    } else if wavelength > original / LOW {
        factor
    } else {
        let smooth = (original / wavelength - LOW) / (HIGH - LOW);
        1.0 / ((1.0 - smooth) / factor + smooth)
    }
}

/// The `rope_scaling` whose factors these are. The file has no other trace of it: the largest factor is
/// that of low frequencies, and the original context is the power of two that gives all the others.
fn llama3(factors: &[f32], theta: f64, head_dim: f64) -> Option<Value> {
    let largest = decimal(factors.iter().copied().fold(1.0, f32::max));
    let fits = |original: f64| {
        factors.iter().enumerate().all(|(i, stored)| {
            let wavelength = std::f64::consts::TAU * theta.powf(2.0 * i as f64 / head_dim);
            let expected = llama3_factor(wavelength, largest, original);
            (f64::from(*stored) - expected).abs() <= TOLERANCE * expected
        })
    };
    let original = (4..24).map(|power| 1_u64 << power).find(|original| fits(*original as f64))?;
    Some(json!({
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": original,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_llama_3_are_recovered_from_its_factors() {
        // Llama 3.1 and 3.2.
        for (factor, original) in [(8.0, 8192_u64), (32.0, 8192)] {
            let wavelength = |i: usize| std::f64::consts::TAU * 500_000_f64.powf(i as f64 / 32.0);
            let factor_of = |i| llama3_factor(wavelength(i), factor, original as f64) as f32;
            let factors: Vec<f32> = (0..32).map(factor_of).collect();
            let found = llama3(&factors, 500_000.0, 64.0).unwrap();
            assert_eq!(found["factor"], factor);
            assert_eq!(found["original_max_position_embeddings"], original);
        }
        assert_eq!(llama3(&[1.0, 2.0, 1.0, 3.0], 10_000.0, 8.0), None);
    }
}
