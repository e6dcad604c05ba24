//! The plots of a report.

use std::collections::BTreeSet;

use hone_core::types::StepRecord;
use hone_train::monitoring::metric_names;

use super::data::RunReport;
use super::svg::{Chart, Series, render};

/// A plot and its file name.
pub(super) struct Plot {
    pub file: String,
    /// Text alternative of the image.
    pub alt: &'static str,
    pub svg: String,
}

/// The KL above which a warning is raised (the default of `WarningConfig::max_kl`).
const KL_LIMIT: f64 = 0.5;

/// Every plot that has a point, in display order.
pub(super) fn all(report: &RunReport) -> Vec<Plot> {
    let steps = &report.steps;
    let metric =
        |name: &'static str, label: &str| line(label, steps, |s| metric_names::finite(s, name));
    let plot = |file: &str, alt: &'static str, y_label: &str, series: Vec<Series>| {
        let series: Vec<Series> = series.into_iter().filter(|s| !s.points.is_empty()).collect();
        let tallest = series.iter().flat_map(|s| s.points.iter().map(|p| p.1)).fold(0.0, f64::max);
        // A distant limit would flatten the curve.
        let near = file == "kl" && tallest > KL_LIMIT / 2.0;
        let limit = near.then(|| (KL_LIMIT, "warning".to_owned()));
        let chart = Chart {
            title: alt.to_owned(),
            x_label: "optimizer step".to_owned(),
            y_label: y_label.to_owned(),
            limit,
            series,
        };
        render(&chart).map(|svg| Plot { file: format!("{file}.svg"), alt, svg })
    };
    let mut reward = metric(metric_names::REWARD_MEAN, "reward");
    reward.band = steps.iter().filter_map(band).collect();
    let held_out = Series {
        name: "held-out reward".to_owned(),
        points: report.held_out.iter().map(|(step, value)| (*step as f64, *value)).collect(),
        band: Vec::new(),
        dots: true,
    };
    let parts: BTreeSet<&str> = steps.iter().flat_map(metric_names::parts).collect();
    let parts =
        parts.into_iter().map(|part| line(part, steps, |s| metric_names::part(s, part))).collect();
    let lengths = vec![metric(metric_names::LENGTH, "length")];
    let clips =
        vec![metric(metric_names::CLIP_LOW, "below"), metric(metric_names::CLIP_HIGH, "above")];
    [
        plot("reward", "Reward, with one standard deviation within groups", "reward", vec![reward]),
        plot("held_out", "Reward on held-out prompts", "reward", vec![held_out]),
        plot("parts", "Parts of the reward", "mean", parts),
        plot(
            "kl",
            "KL to the reference policy",
            "nats per token",
            vec![metric(metric_names::KL, "KL")],
        ),
        plot(
            "entropy",
            "Entropy of the policy",
            "nats per token",
            vec![metric(metric_names::ENTROPY, "")],
        ),
        plot("length", "Length of completions", "tokens", lengths),
        plot("clipping", "Tokens whose ratio was clipped", "share", clips),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn line(name: &str, steps: &[StepRecord], value: impl Fn(&StepRecord) -> Option<f64>) -> Series {
    let points = steps.iter().filter_map(|s| Some((s.step as f64, value(s)?))).collect();
    Series { name: name.to_owned(), points, band: Vec::new(), dots: false }
}

fn band(step: &StepRecord) -> Option<(f64, f64, f64)> {
    let mean = metric_names::finite(step, metric_names::REWARD_MEAN)?;
    let std = metric_names::finite(step, metric_names::REWARD_STD)?;
    Some((step.step as f64, mean - std, mean + std))
}
