//! The meaning of TRL's options in Hone's keys.

mod batch;
mod copied;
mod loss;
mod schedule;

use serde_json::Value;

use hone_core::text::shortened;

use crate::config::counterpart;

use super::options::{Given, TrlOptions};
use super::settings::TrlSettings;

/// Options in conversion: what remains of the file, and what it became.
struct TrlConversion {
    options: TrlOptions,
    settings: TrlSettings,
}

/// Converts every option into a key or a note.
///
/// # Errors
/// A value of the wrong type, with its line.
pub(super) fn convert(options: TrlOptions) -> Result<TrlSettings, String> {
    let mut conversion = TrlConversion { options, settings: TrlSettings::default() };
    conversion.copy()?;
    conversion.batch()?;
    conversion.duration()?;
    conversion.schedule()?;
    conversion.loss()?;
    conversion.advantages()?;
    conversion.kl()?;
    conversion.sampler_correction()?;
    conversion.lora()?;
    conversion.dataset()?;
    conversion.run()?;
    conversion.rewards();
    let TrlConversion { options, mut settings } = conversion;
    for (name, given, line) in options.rest() {
        note_rest(&mut settings, &name, &given, line);
    }
    Ok(settings)
}

/// Notes an option that became no key.
fn note_rest(settings: &mut TrlSettings, name: &str, given: &Given, line: Option<usize>) {
    let place = line.map_or_else(String::new, |line| format!("line {line}: "));
    let Some(row) = counterpart(name) else {
        let text = if name.starts_with('*') {
            format!("{place}these arguments are known only when the file runs")
        } else {
            "neither TRL's GRPOConfig nor Hone has this option".to_owned()
        };
        return settings.note(name, text);
    };
    let (keys, note) = (row.keys.join(", "), row.plain_note());
    let text = match given {
        _ if keys.is_empty() => note,
        Given::Expression(text) => {
            format!("{place}`{}` is not a literal: set {keys}", shortened(text, 60))
        }
        Given::Literal(_) if note.is_empty() => format!("compare {keys}"),
        Given::Literal(_) => format!("compare {keys}: {note}"),
    };
    settings.note(name, text);
}

impl TrlConversion {
    /// Notes an option whose value has no counterpart.
    fn note_value(&mut self, name: &str, value: &Value, reason: &str) {
        let shown = value.to_string();
        self.settings.note(name, format!("{}: {reason}", shortened(&shown, 60)));
    }

    /// Reward functions with their weights.
    fn rewards(&mut self) {
        let weights = self.options.take("reward_weights");
        let functions = match self.options.take("reward_funcs") {
            Some(Value::Array(functions)) => functions,
            Some(function) => vec![function],
            None => Vec::new(),
        };
        if let (Some(weights), true) = (&weights, functions.is_empty()) {
            self.note_value("reward_weights", weights, "set route.reward.weight of each part");
        }
        for (i, function) in functions.iter().enumerate() {
            let name = function.as_str().map_or_else(|| function.to_string(), str::to_owned);
            let weight = weights.as_ref().and_then(|weights| weights.get(i)?.as_f64());
            self.settings.rewards.push((name, weight));
        }
    }
}
