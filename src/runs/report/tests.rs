use std::collections::BTreeMap;

use hone_core::types::StepRecord;
use hone_train::monitoring::warnings::{Warning, WarningKind};

use super::data::SamplePair;
use super::*;
use crate::runs::Best;
use hone_report::stats::{estimate, paired_difference};

fn step(step: u64) -> StepRecord {
    let x = step as f64 / 60.0;
    let wave = (step as f64 * 1.7).sin();
    let metrics: BTreeMap<String, f64> = [
        ("reward_mean", 0.4 + 0.9 * x + 0.05 * wave),
        ("reward_std", 0.4 - 0.2 * x),
        ("kl", 0.4 * x * x),
        ("entropy", 1.2 - 0.7 * x),
        ("completion_length", 30.0 + 8.0 * x + wave),
        ("clip_low", 0.01),
        ("clip_high", 0.02 + 0.01 * x),
        ("tokens", 2000.0),
        ("part/correct", 0.3 + 0.5 * x),
        ("part/format", 0.1 + 0.85 * x),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect();
    StepRecord { step, groups: Vec::new(), metrics, created: 1_700_000_000_000 + step * 2000 }
}

fn report() -> RunReport {
    let before: Vec<f64> = (0..40).map(|i| f64::from(i % 5 == 0)).collect();
    let after: Vec<f64> = (0..40).map(|i| f64::from(i % 5 != 1)).collect();
    let pairs: Vec<(f64, f64)> = before.iter().copied().zip(after.iter().copied()).collect();
    RunReport {
        name: "additions".to_owned(),
        model: "hone-tiny".to_owned(),
        started: 1_700_000_000_000,
        ended: 1_700_000_123_000,
        ending: Ending::Finished,
        configuration: vec![
            ("train.learning_rate".to_owned(), "1e-4".to_owned()),
            ("rollout.group_size".to_owned(), "8".to_owned()),
        ],
        configuration_text: "[rollout]\ngroup_size = 8\nnote = '```'\n".to_owned(),
        configuration_file: Some("runs/additions/config.toml".to_owned()),
        steps: (1..=60).map(step).collect(),
        held_out: (0..=6).map(|i| (i * 10, 0.4 + 0.13 * i as f64)).collect(),
        comparisons: vec![
            Comparison {
                name: "correct".to_owned(),
                before: estimate(&before, 1),
                after: estimate(&after, 1),
                difference: paired_difference(&pairs, 1),
            },
            Comparison { name: "judge|x".to_owned(), before: None, after: None, difference: None },
        ],
        samples: vec![SamplePair {
            prompt: "What is 2 + 2?".to_owned(),
            before: Some(("five ```maybe```".to_owned(), None)),
            after: Some(("<answer>4</answer>\n".to_owned(), Some(1.5))),
        }],
        warnings: vec![Warning {
            kind: WarningKind::KlExplosion,
            step: 12,
            message: "KL to the reference reached 0.734 nats a token, above 0.5".to_owned(),
            advice: WarningKind::KlExplosion.advice().to_owned(),
        }],
        best: Some(Best { step: 60, reward: 1.18 }),
        best_checkpoint: Some("runs/additions/best".to_owned()),
        recorded: None,
    }
}

#[test]
fn the_text_of_a_report() {
    insta::assert_snapshot!(report().markdown(), @r"
    # additions

    - **Model**: hone-tiny
    - **Began**: 2023-11-14 22:13:20 UTC
    - **Took**: 2:03 (60 steps, 120000 completion tokens)
    - **Ending**: all steps were taken
    - **Held-out reward**: 0.400 at first, 1.180 at the end
    - **Best**: 1.180 at step 60, saved in runs/additions/best
    - **Warnings**: 1, see below

    ## Held-out prompts before and after

    Means with 95 % confidence intervals; the difference is over the same prompts. ▲ and ▼: its interval excludes 0.

    |          |                 before |                  after |                difference |   |
    |----------|------------------------|------------------------|---------------------------|---|
    | correct  | 0.200 (0.105 to 0.348) | 0.800 (0.652 to 0.895) | +0.600 (+0.450 to +0.750) | ▲ |
    | judge\|x |                      – |                      – |                         – |   |

    ## Warnings

    | step | kind         | observation                                               | advice                                                                                                                                  |
    |------|--------------|-----------------------------------------------------------|-----------------------------------------------------------------------------------------------------------------------------------------|
    | 12   | kl explosion | KL to the reference reached 0.734 nats a token, above 0.5 | Lower `train.learning_rate`, raise `train.beta`, or lower `train.max_grad_norm`, and continue from a version published before the rise. |

    ## Metrics

    |                                               | course                                   |   first |    last |
    |-----------------------------------------------|------------------------------------------|---------|---------|
    | reward                                        | ▁▁▂▂▂▂▂▂▂▂▃▃▃▃▃▄▃▄▄▄▅▄▅▅▅▅▅▆▅▆▆▆▇▆▇▇▇▇▇█ |  0.4646 |  1.3497 |
    | its standard deviation within groups          | ███▇▇▇▇▇▇▆▆▆▆▆▆▅▅▅▅▅▄▄▄▄▄▄▃▃▃▃▃▂▂▂▂▂▂▁▁▁ |  0.3967 |  0.2000 |
    | reward on held-out prompts                    | ▁▂▃▄▆▇█                                  |  0.4000 |  1.1800 |
    | part correct                                  | ▁▁▁▂▂▂▂▂▂▃▃▃▃▃▃▄▄▄▄▄▅▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇▇███ |  0.3083 |  0.8000 |
    | part format                                   | ▁▁▁▂▂▂▂▂▂▃▃▃▃▃▃▄▄▄▄▄▅▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇▇███ |  0.1142 |  0.9500 |
    | KL to the reference policy in nats per token  | ▁▁▁▁▁▁▁▁▁▁▁▂▂▂▂▂▂▂▃▃▃▃▃▃▄▄▄▄▅▅▅▅▆▆▆▇▇▇██ |  0.0001 |  0.4000 |
    | entropy of the policy in nats per token       | ███▇▇▇▇▇▇▆▆▆▆▆▆▅▅▅▅▅▄▄▄▄▄▄▃▃▃▃▃▂▂▂▂▂▂▁▁▁ |  1.1883 |  0.5000 |
    | length of completions in tokens               | ▂▁▂▂▂▃▂▃▃▃▄▃▄▃▃▄▃▄▄▄▅▄▅▅▅▅▅▆▅▆▆▆▇▆▇▇▆▇▆█ | 31.1250 | 38.9948 |
    | share of tokens whose ratio was clipped below | ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁ |  0.0100 |  0.0100 |
    | share of tokens whose ratio was clipped above | ▁▁▁▂▂▂▂▂▂▃▃▃▃▃▃▄▄▄▄▄▅▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇▇███ |  0.0202 |  0.0300 |

    ## Samples

    ### 1

    Prompt:

    ```text
    What is 2 + 2?
    ```

    Before, reward –:

    ````text
    five ```maybe```
    ````

    After, reward 1.50:

    ```text
    <answer>4</answer>

    ```

    ## Configuration

    Keys that differ from their defaults:

    | key                  | value |
    |----------------------|-------|
    | train.learning\_rate | 1e-4  |
    | rollout.group\_size  | 8     |

    All keys, also in runs/additions/config.toml:

    ````toml
    [rollout]
    group_size = 8
    note = '```'
    ````
    ");
}

#[test]
fn reports_are_reproducible_and_need_no_steps() {
    let ending = Ending::Failed("no *disk*".to_owned());
    let text = RunReport { ending, ..RunReport::default() }.markdown();
    assert!(
        text.contains("failed: no \\*disk\\*") && text.contains("No step was taken."),
        "{text}"
    );
    let (dir, report) = (tempfile::tempdir().unwrap(), report());
    let path = report.write(&dir.path().join("a/b")).unwrap();
    let again: RunReport = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    assert_eq!(std::fs::read_to_string(path).unwrap(), again.markdown());
}
