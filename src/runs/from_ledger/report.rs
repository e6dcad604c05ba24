//! The result of a run on records, for the terminal and for the report.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::estimate::{PolicyEstimate, RELIABLE_SHARE};
use super::read::RecordCounts;

/// The result of a run on the records of a ledger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordReport {
    /// The ledger's file.
    pub ledger: String,
    /// The records that pass the filter.
    pub records: RecordCounts,
    /// Prompts to train on.
    pub train_prompts: usize,
    /// Records to train on: completions of groups.
    pub train_records: usize,
    /// Held-out prompts.
    pub held_out_prompts: usize,
    /// Held-out completions.
    pub held_out_records: usize,
    /// Samples that steps left out, because the policy has moved too far away from them. A sample of
    /// several steps counts for each of them.
    pub left_out: u64,
    /// Batches without a step.
    pub skipped_batches: u64,
    /// Mean recorded reward of the held-out completions.
    pub mean_reward: f64,
    /// The policy before the first step, on the held-out completions.
    pub before: PolicyEstimate,
    /// The policy after the last step.
    pub after: PolicyEstimate,
}

impl RecordReport {
    /// The measurements on the held-out completions as `[name, before, after]`.
    pub fn rows(&self) -> Vec<[String; 3]> {
        let value = |value: Option<f64>| value.map_or("–".to_owned(), |v| format!("{v:.4}"));
        let row = |name: &str, of: &dyn Fn(&PolicyEstimate) -> Option<f64>| {
            [name.to_owned(), value(of(&self.before)), value(of(&self.after))]
        };
        vec![
            row("estimated reward", &|e| e.reward),
            row("effective records", &|e| Some(e.effective_records)),
            row("log-ratio, reward above the mean", &|e| e.log_ratio_above),
            row("log-ratio, reward below the mean", &|e| e.log_ratio_below),
            row("KL to the behavior policy", &|e| e.behavior_kl),
        ]
    }

    /// What the records are, one fact a line.
    pub fn facts(&self) -> Vec<String> {
        let Self { train_records, train_prompts, held_out_records, held_out_prompts, .. } = self;
        let skipped = self.records.skipped_text();
        let mut facts = vec![format!("{} records in {}", self.records.found, self.ledger)];
        if !skipped.is_empty() {
            facts.push(format!("not used: {skipped}"));
        }
        facts.push(format!(
            "trained on {train_records} records of {train_prompts} prompts, {held_out_records} of \
             {held_out_prompts} prompts held out"
        ));
        if self.left_out > 0 {
            facts.push(format!(
                "left out of steps: {} samples from which the policy has moved away",
                self.left_out
            ));
        }
        facts.push(format!("mean recorded reward of held-out records: {:.4}", self.mean_reward));
        facts
    }

    /// What makes an estimate unreliable; `None` if both are reliable.
    pub fn warning(&self) -> Option<String> {
        let estimates = [("before", &self.before), ("after", &self.after)];
        let doubtful: Vec<&str> =
            estimates.iter().filter(|(_, e)| !e.reliable).map(|(name, _)| *name).collect();
        (!doubtful.is_empty()).then(|| {
            format!(
                "the estimated reward {} training is unreliable: fewer than {:.0} % of the held-out \
                 records are effective, because the policy is far from those that sampled them",
                doubtful.join(" and "),
                100.0 * RELIABLE_SHARE
            )
        })
    }

    /// The section of the run's report, as Markdown. Its texts contain no markup.
    pub fn markdown(&self) -> String {
        let mut text = "## Recorded completions\n\n".to_owned();
        for fact in self.facts() {
            text += &format!("- {}\n", fact.replace('_', "\\_"));
        }
        text += "\n| held-out records | before | after |\n| --- | --- | --- |\n";
        for [name, before, after] in self.rows() {
            text += &format!("| {name} | {before} | {after} |\n");
        }
        if let Some(warning) = self.warning() {
            text += &format!("\n**Warning**: {warning}.\n");
        }
        text.push('\n');
        text
    }
}

impl fmt::Display for RecordReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for fact in self.facts() {
            writeln!(f, "{fact}")?;
        }
        writeln!(f, "\n  {:34}  {:>10}  {:>10}", "", "before", "after")?;
        for [name, before, after] in self.rows() {
            writeln!(f, "  {name:34}  {before:>10}  {after:>10}")?;
        }
        if let Some(warning) = self.warning() {
            writeln!(f, "\nwarning: {warning}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::runs::from_ledger::read::RecordSkip;

    fn report() -> RecordReport {
        let estimate = |reward, effective_records, log_ratio| PolicyEstimate {
            reward: Some(reward),
            effective_records,
            reliable: effective_records >= 2.0,
            log_ratio_above: Some(log_ratio),
            log_ratio_below: None,
            behavior_kl: Some(0.001),
        };
        RecordReport {
            ledger: "old_data/ledger.redb".to_owned(),
            records: RecordCounts {
                found: 120,
                used: 105,
                skipped: BTreeMap::from([(RecordSkip::TooLong, 12), (RecordSkip::NoReward, 3)]),
            },
            train_prompts: 11,
            train_records: 85,
            held_out_prompts: 3,
            held_out_records: 20,
            left_out: 2,
            skipped_batches: 0,
            mean_reward: 0.5,
            before: estimate(0.5, 19.5, 0.0),
            after: estimate(0.75, 1.5, 3.25),
        }
    }

    #[test]
    fn the_table_of_a_run() {
        insta::assert_snapshot!(report().to_string(), @r"
        120 records in old_data/ledger.redb
        not used: 12 too long, 3 without a reward
        trained on 85 records of 11 prompts, 20 of 3 prompts held out
        left out of steps: 2 samples from which the policy has moved away
        mean recorded reward of held-out records: 0.5000

                                                  before       after
          estimated reward                        0.5000      0.7500
          effective records                      19.5000      1.5000
          log-ratio, reward above the mean        0.0000      3.2500
          log-ratio, reward below the mean             –           –
          KL to the behavior policy               0.0010      0.0010

        warning: the estimated reward after training is unreliable: fewer than 10 % of the held-out records are effective, because the policy is far from those that sampled them
        ");
    }

    #[test]
    fn the_section_of_a_report() {
        let text = report().markdown();
        assert!(text.contains("- 120 records in old\\_data/ledger.redb\n"), "{text}");
        assert!(text.contains("| estimated reward | 0.5000 | 0.7500 |\n"), "{text}");
        assert!(text.contains("\n**Warning**: the estimated reward after training"), "{text}");
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["records"]["skipped"]["too_long"], 12);
        assert_eq!(serde_json::from_value::<RecordReport>(json).unwrap(), report());
    }
}
