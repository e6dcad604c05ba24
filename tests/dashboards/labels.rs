//! Computes the labels of a PromQL expression's results from the exported metrics.

use std::collections::BTreeSet;

use promql_parser::parser::{
    AggregateExpr, BinaryExpr, Call, Expr, LabelModifier, VectorSelector, token,
};

use hone_core::metrics::{MetricDescription, MetricKind};

/// Names of labels.
pub type Labels = BTreeSet<String>;

/// Labels that Prometheus adds to every series it scrapes.
const SCRAPED: [&str; 2] = ["instance", "job"];
/// Functions that apply only to counters and histograms.
const COUNTER_FUNCTIONS: [&str; 3] = ["rate", "irate", "increase"];

/// Finds the metric of a series, and whether the series has the label `le`.
fn metric<'a>(
    all: &'a [MetricDescription],
    series: &str,
) -> Result<(&'a MetricDescription, bool), String> {
    for d in all {
        let suffix = series.strip_prefix(d.name.as_str());
        match (d.kind, suffix) {
            (MetricKind::Histogram, Some("_bucket")) => return Ok((d, true)),
            (MetricKind::Histogram, Some("_sum" | "_count")) => return Ok((d, false)),
            (MetricKind::Counter | MetricKind::Gauge, Some("")) => return Ok((d, false)),
            _ => {}
        }
    }
    Err(format!("no exported metric has the series {series}"))
}

/// The labels of a selector's series; fails on an unknown metric or label.
fn of_selector(all: &[MetricDescription], selector: &VectorSelector) -> Result<Labels, String> {
    let name = selector.name.as_deref().ok_or("a selector without a metric name")?;
    let (description, bucket) = metric(all, name)?;
    let mut labels: Labels = description.labels.iter().cloned().collect();
    labels.extend(SCRAPED.map(str::to_owned));
    if bucket {
        labels.insert("le".to_owned());
    }
    let matchers = &selector.matchers;
    for matcher in matchers.matchers.iter().chain(matchers.or_matchers.iter().flatten()) {
        if !labels.contains(&matcher.name) {
            return Err(format!("{name} has no label {}", matcher.name));
        }
    }
    Ok(labels)
}

fn contained(wanted: &LabelModifier, labels: &Labels) -> Result<Labels, String> {
    let wanted: Labels = wanted.labels().labels.iter().cloned().collect();
    match wanted.difference(labels).next() {
        Some(missing) => Err(format!("there is no label {missing} to group or match by")),
        None => Ok(wanted),
    }
}

fn of_aggregate(all: &[MetricDescription], aggregate: &AggregateExpr) -> Result<Labels, String> {
    let inner = of(all, &aggregate.expr)?;
    match &aggregate.modifier {
        None => Ok(Labels::new()),
        Some(by @ LabelModifier::Include(_)) => contained(by, &inner),
        Some(without) => Ok(inner.difference(&contained(without, &inner)?).cloned().collect()),
    }
}

fn of_binary(all: &[MetricDescription], binary: &BinaryExpr) -> Result<Labels, String> {
    let (left, right) = (of(all, &binary.lhs)?, of(all, &binary.rhs)?);
    if let Some(matching) = binary.modifier.as_ref().and_then(|m| m.matching.as_ref()) {
        contained(matching, &left)?;
        contained(matching, &right)?;
    } else if !left.is_empty() && !right.is_empty() && left != right {
        return Err(format!("{left:?} and {right:?} never match without on()"));
    }
    if binary.op.id() == token::T_LOR { Ok(&left | &right) } else { Ok(left) }
}

fn of_call(all: &[MetricDescription], call: &Call) -> Result<Labels, String> {
    let mut labels = Labels::new();
    for argument in &call.args.args {
        labels.extend(of(all, argument)?);
    }
    match call.func.name {
        name if COUNTER_FUNCTIONS.contains(&name) => {
            let Some(Expr::MatrixSelector(range)) = call.args.args.first().map(|a| &**a) else {
                return Err(format!("{name}() of something that is not a range"));
            };
            let series = range.vs.name.as_deref().unwrap_or_default();
            if metric(all, series)?.0.kind == MetricKind::Gauge {
                return Err(format!("{name}() of the gauge {series}"));
            }
        }
        "histogram_quantile" if !labels.remove("le") => {
            return Err("histogram_quantile() of series without le".to_owned());
        }
        "absent" => labels.clear(),
        _ => {}
    }
    Ok(labels)
}

/// The label names that the results of an expression can have.
///
/// # Errors
/// If a metric or label is not exported, or a function does not apply to the type of the metric.
pub fn of(all: &[MetricDescription], expr: &Expr) -> Result<Labels, String> {
    match expr {
        Expr::VectorSelector(selector) => of_selector(all, selector),
        Expr::MatrixSelector(range) => of_selector(all, &range.vs),
        Expr::Aggregate(aggregate) => of_aggregate(all, aggregate),
        Expr::Binary(binary) => of_binary(all, binary),
        Expr::Call(call) => of_call(all, call),
        Expr::Paren(paren) => of(all, &paren.expr),
        Expr::Unary(unary) => of(all, &unary.expr),
        Expr::Subquery(subquery) => of(all, &subquery.expr),
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) => Ok(Labels::new()),
        Expr::Extension(_) => Err("an extension".to_owned()),
    }
}
