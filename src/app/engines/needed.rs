//! Which engines a configuration needs.

use hone_engine::{EngineBackend, ModelDir};
use hone_model::weights::Quantize;

use super::native::NativePurpose;
use crate::config::Config;

/// The engines of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::app) enum EnginesNeeded {
    /// mistral.rs answers clients and samples for the trainer.
    Mistralrs,
    /// mistral.rs answers clients, and the native engine samples for the trainer.
    Both,
    /// The native engine does both.
    Native,
}

impl EnginesNeeded {
    /// The engines of `hone serve`, or without clients of `hone train` and `hone eval`.
    pub fn of(config: &Config, has_clients: bool) -> Self {
        // The only device so far is the CPU.
        let samples_natively = config.rollout.sampler.is_native(true);
        match config.engine.backend {
            EngineBackend::Native => Self::Native,
            EngineBackend::Mistralrs if !samples_natively => Self::Mistralrs,
            // Nothing else is left to generate.
            EngineBackend::Mistralrs if !has_clients => Self::Native,
            EngineBackend::Mistralrs if config.rollout.enabled => Self::Both,
            EngineBackend::Mistralrs => Self::Mistralrs,
        }
    }

    /// Refuses weights that mistral.rs cannot serve where it would.
    ///
    /// # Errors
    /// With the key and the value that do not fit `engine.backend`.
    pub fn check(self, config: &Config, model: &ModelDir) -> anyhow::Result<()> {
        let judges = config.uses_self_judge() && config.engine.backend == EngineBackend::Mistralrs;
        if !self.has_mistralrs() && !judges {
            return Ok(());
        }
        let quantize = config.model.quantize;
        anyhow::ensure!(
            quantize == Quantize::None,
            "model.quantize is \"{}\", which needs engine.backend = \"native\": mistral.rs cannot \
             serve these weights with adapters",
            quantize.as_str()
        );
        anyhow::ensure!(
            !model.is_gguf(),
            "model.path is {:?}: a GGUF file needs engine.backend = \"native\", because mistral.rs \
             cannot serve it with adapters",
            model.path.display().to_string()
        );
        Ok(())
    }

    /// Whether mistral.rs loads the model.
    pub fn has_mistralrs(self) -> bool {
        self != Self::Native
    }

    /// What the native engine does, if it runs.
    pub fn native_purpose(self, has_clients: bool) -> Option<NativePurpose> {
        match self {
            Self::Mistralrs => None,
            Self::Native if has_clients => Some(NativePurpose::Serving),
            Self::Both | Self::Native => Some(NativePurpose::Sampling),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backend_sampler_and_clients_select_the_engines() {
        use EnginesNeeded::{Both, Mistralrs, Native};
        let needed = |lines: &str| {
            let config = crate::config::parse(lines).unwrap();
            [true, false].map(|has_clients| EnginesNeeded::of(&config, has_clients))
        };
        assert_eq!(needed(""), [Both, Native]);
        assert_eq!(needed("rollout.enabled = false"), [Mistralrs, Native]);
        assert_eq!(needed("rollout.sampler = 'engine'"), [Mistralrs, Mistralrs]);
        for sampler in ["auto", "engine", "native"] {
            let lines = format!("engine.backend = 'native'\nrollout.sampler = '{sampler}'");
            assert_eq!(needed(&lines), [Native, Native], "{sampler}");
        }
    }

    #[test]
    fn the_key_limits_the_adapters_of_an_engine_with_clients() {
        let kept = |lines: &str| {
            let config = crate::config::parse(lines).unwrap();
            let all = [NativePurpose::Serving, NativePurpose::Sampling, NativePurpose::Judging];
            all.map(|purpose| purpose.kept_versions(&config))
        };
        assert_eq!(kept(""), [8, 1, 0]);
        assert_eq!(kept("engine.kept_versions = 0"), [0, 1, 0]);
    }

    #[test]
    fn slots_are_shared_with_clients_or_limited_for_rollouts() {
        let slots = |lines: &str, purpose: NativePurpose| {
            purpose.slots(&crate::config::parse(lines).unwrap())
        };
        let (serving, sampling) = (NativePurpose::Serving, NativePurpose::Sampling);
        assert_eq!([serving, sampling].map(|purpose| slots("", purpose)), [64, 64]);
        let both = "engine.slots = 9\nrollout.max_concurrent = 3";
        assert_eq!([serving, sampling].map(|purpose| slots(both, purpose)), [9, 3]);
        assert_eq!(EnginesNeeded::Native.native_purpose(true), Some(serving));
        assert_eq!(EnginesNeeded::Native.native_purpose(false), Some(sampling));
        assert_eq!(EnginesNeeded::Both.native_purpose(true), Some(sampling));
        assert_eq!(EnginesNeeded::Mistralrs.native_purpose(true), None);
    }
}
