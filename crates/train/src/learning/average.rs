//! The average of the adapter over steps, which is served in place of the current values.
//!
//! Exponential (Polyak & Juditsky 1992, as `torch.optim.swa_utils.get_ema_multi_avg_fn`) or uniform
//! from some step on (Izmailov et al. 2018, stochastic weight averaging). The average starts as a
//! copy of the first values, so the untrained initial values do not enter it. Factors are averaged,
//! not their products.

use hone_model::adapter::weights::LoraWeights;

use crate::config::TrainConfig;
use crate::error::Result;

#[derive(Clone, Copy, Debug)]
enum AverageKind {
    /// `avg <- decay avg + (1 - decay) p`
    Exponential(f64),
    /// `avg <- avg + (p - avg) / n`, with n counted from this step on.
    Uniform(u64),
}

/// A configured average.
#[derive(Clone, Debug)]
pub(crate) struct Average {
    kind: AverageKind,
    /// `None` before the first values.
    lora: Option<LoraWeights>,
    /// Number of values in the average.
    count: u64,
}

impl Average {
    /// The average of `train.ema_decay` or `train.swa_start`; `None` if both are 0.
    pub(crate) fn new(config: &TrainConfig) -> Option<Self> {
        let kind = if config.ema_decay > 0.0 {
            AverageKind::Exponential(config.ema_decay)
        } else if config.swa_start > 0 {
            AverageKind::Uniform(config.swa_start)
        } else {
            return None;
        };
        Some(Self { kind, lora: None, count: 0 })
    }

    /// Adds the values after step number `steps` (from 1).
    pub(crate) fn observe(&mut self, lora: &LoraWeights, steps: u64) -> Result<()> {
        let share = match self.kind {
            AverageKind::Uniform(start) if steps < start => return Ok(()),
            AverageKind::Uniform(_) => 1.0 / (self.count + 1) as f64,
            AverageKind::Exponential(decay) => 1.0 - decay,
        };
        match &self.lora {
            None => self.lora = Some(lora.copy()?),
            Some(average) => average.lerp(lora, share)?,
        }
        self.count += 1;
        Ok(())
    }

    /// The average; `None` before the first values.
    pub(crate) fn lora(&self) -> Option<&LoraWeights> {
        self.lora.as_ref()
    }

    /// Number of values in the average. The average of one value is a copy of it.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Continues from a saved average.
    pub(crate) fn restore(&mut self, lora: Option<LoraWeights>, count: u64) {
        self.count = if lora.is_some() { count } else { 0 };
        self.lora = lora;
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use serde_json::Value;

    use hone_model::testing::{test_file, tiny_spec, values};

    use super::*;
    use crate::testing::tiny_config;

    fn averages(config: &TrainConfig, steps: u64) -> Vec<[f64; 2]> {
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let (spec, device) = (tiny_spec(), Device::Cpu);
        let lora = LoraWeights::fresh(&spec, &config.lora, &mut rng, DType::F64, &device).unwrap();
        let mut average = Average::new(config).unwrap();
        let mut found = Vec::new();
        for step in 1..=steps {
            for (name, var) in lora.parameters() {
                let value =
                    if name.contains("lora_A") { (step * step) as f64 } else { 1.0 / step as f64 };
                var.set(&(var.ones_like().unwrap() * value).unwrap()).unwrap();
            }
            average.observe(&lora, step).unwrap();
            if let Some(average) = average.lora() {
                let parameters = average.parameters();
                found.push([values(parameters[0].1)[0], values(parameters[1].1)[0]]);
            }
        }
        assert_eq!(average.count(), found.len() as u64);
        found
    }

    #[test]
    fn averages_equal_those_of_pytorch() {
        let text = std::fs::read(test_file("reference/learning/optimizer_cases.json")).unwrap();
        let reference: Value = serde_json::from_slice(&text).unwrap();
        let expected = |key: &str| -> Vec<[f64; 2]> {
            serde_json::from_value(reference[key]["values"].clone()).unwrap()
        };
        let decay = reference["ema"]["decay"].as_f64().unwrap();
        let start = reference["swa"]["start"].as_u64().unwrap();
        let ema = averages(&TrainConfig { ema_decay: decay, ..tiny_config() }, 5);
        let swa = averages(&TrainConfig { swa_start: start, ..tiny_config() }, 6);
        for (own, torch) in [(ema, expected("ema")), (swa, expected("swa"))] {
            assert_eq!(own.len(), torch.len());
            for (own, torch) in own.iter().flatten().zip(torch.iter().flatten()) {
                assert!(
                    (own - torch).abs() < 1e-12 * torch.abs().max(1.0),
                    "{own} against {torch}"
                );
            }
        }
        assert!(Average::new(&tiny_config()).is_none());
    }
}
