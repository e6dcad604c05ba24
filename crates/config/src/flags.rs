//! Parsers of the values of flags.

use std::ops::RangeInclusive;

use clap::builder::{PossibleValue, PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use serde::Deserialize;
use serde::de::value::Error as ValueError;
use serde::de::{DeserializeOwned, IntoDeserializer};

use hone_engine::EngineBackend;
use hone_model::kernels::compute::Compute;
use hone_model::weights::Quantize;
use hone_rollout::SamplerKind;
use hone_train::config::DeviceChoice;
use hone_train::policy::Promotion;

use super::schema::FleetRole;

/// The values of `--backend`.
pub fn engine_backend() -> impl TypedValueParser<Value = EngineBackend> {
    let values = [
        ("mistralrs", "mistral.rs; on a CPU each of its engines decodes one sequence at a time"),
        ("native", "Hone's batched engine, on the weights that the trainer uses"),
    ];
    one_of(values)
}

/// Parses the value of `--device`: `cpu` or `cuda:N`.
///
/// # Errors
/// If it is another one.
pub fn device(text: &str) -> Result<DeviceChoice, String> {
    match DeviceChoice::deserialize(text.into_deserializer()) as Result<_, ValueError> {
        Ok(device) if device != DeviceChoice::Auto => Ok(device),
        _ => Err("not cpu or cuda:N".to_owned()),
    }
}

/// The values of `--role`.
pub fn fleet_role() -> impl TypedValueParser<Value = FleetRole> {
    let values = [
        ("all", "It serves and learns alone, without a fleet"),
        ("server", "It serves, grades and records; any number of processes"),
        ("trainer", "It learns from all servers and publishes; one runs, others stand by"),
    ];
    one_of(values)
}

/// The values of `--quantize`.
pub fn quantize() -> impl TypedValueParser<Value = Quantize> {
    let values = [
        ("none", "the format of the model's files"),
        ("q8_0", "8.5 bits a weight"),
        ("q4_k", "4.5 bits a weight"),
    ];
    one_of(values)
}

/// The values of `--compute`.
pub fn compute() -> impl TypedValueParser<Value = Compute> {
    let values = [
        ("f32", "32-bit floats"),
        (
            "bf16",
            "Factors rounded to bf16, sums in f32; f32 where the processor is not faster with bf16",
        ),
    ];
    one_of(values)
}

/// The values of `--sampler`.
pub fn sampler_kind() -> impl TypedValueParser<Value = SamplerKind> {
    let values = [
        ("auto", "The native sampler on a CPU, else the serving engine"),
        ("engine", "The serving engine, in slots that no client uses"),
        ("native", "The native sampler, which batches sequences on the trainer's weights"),
    ];
    one_of(values)
}

/// The values of `--promotion` and `--modes`.
pub fn promotion() -> impl TypedValueParser<Value = Promotion> {
    let values = [
        ("direct", "After a comparison of served and trained log-probabilities only"),
        ("gate", "After that, bounds on the drift, and an exam on held-out prompts"),
        ("canary", "After the gate, and a share of the traffic until users' ratings decide"),
    ];
    one_of(values)
}

/// A count within a range.
pub fn count(range: RangeInclusive<u64>) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(range)
}

/// A duration in seconds.
///
/// # Errors
/// If the text is no number above 0.
pub fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| *seconds > 0.0 && seconds.is_finite());
    seconds.ok_or_else(|| "it must be a number above 0".to_owned())
}

/// The values of a type by the names that configurations have, each with its help.
fn one_of<T, const N: usize>(
    values: [(&'static str, &'static str); N],
) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    let values = values.map(|(name, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(values)
        .try_map(|name| T::deserialize(IntoDeserializer::<ValueError>::into_deserializer(name)))
}
