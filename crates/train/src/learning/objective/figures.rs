//! Figures of a step's completions.

/// Lengths of completions in tokens, each with whether it was cut at its token limit, under Hone's
/// names: `completion_length` (mean), `_min`, `_max`; `terminated_length` (of those that ended by
/// themselves; 0 without one), `_min`, `_max`; `truncated_ratio`. Nothing without completions.
pub(crate) fn completions(lengths: impl IntoIterator<Item = (usize, bool)>) -> Vec<(String, f64)> {
    let (mut all, mut ended) = (Vec::new(), Vec::new());
    for (length, truncated) in lengths {
        all.push(length);
        if !truncated {
            ended.push(length);
        }
    }
    if all.is_empty() {
        return Vec::new();
    }
    let cut = (all.len() - ended.len()) as f64 / all.len() as f64;
    let mut out = vec![("truncated_ratio".to_owned(), cut)];
    for (name, list) in [("completion_length", &all), ("terminated_length", &ended)] {
        let sum = list.iter().sum::<usize>() as f64;
        let least = list.iter().min().copied().unwrap_or(0) as f64;
        let greatest = list.iter().max().copied().unwrap_or(0) as f64;
        out.push((name.to_owned(), sum / list.len().max(1) as f64));
        out.push((format!("{name}_min"), least));
        out.push((format!("{name}_max"), greatest));
    }
    out
}
