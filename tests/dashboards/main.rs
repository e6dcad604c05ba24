//! The dashboard and the alert rules use only exported metrics, and Grafana and Prometheus accept
//! them.

mod labels;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use promql_parser::parser;
use serde_json::Value;

use hone_core::metrics::{MetricDescription, MetricKind, Metrics};
use hone_core::testing::{has_program, skip};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn dashboard() -> Value {
    let text = fs::read_to_string(root().join("dashboards/hone.json")).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

fn panels(dashboard: &Value) -> Vec<&Value> {
    dashboard["panels"].as_array().map(|p| p.iter().collect()).unwrap_or_default()
}

fn is_row(panel: &Value) -> bool {
    panel["type"] == "row"
}

/// The labels of an expression's results, after replacing Grafana's variables.
fn check(metrics: &Metrics, expression: &str) -> Result<labels::Labels, String> {
    let filled = expression
        .replace("$__rate_interval", "1m")
        .replace("$__range", "1h")
        .replace("$instance", ".+");
    if filled.contains('$') {
        return Err(format!("{expression}: a variable that the dashboard does not have"));
    }
    let parsed = parser::parse(&filled).map_err(|e| format!("{expression}: {e}"))?;
    labels::of(metrics.descriptions(), &parsed).map_err(|e| format!("{expression}: {e}"))
}

/// The names in `{{name}}` or, with the prefix `$labels.`, in `{{ $labels.name }}`.
fn placeholders(text: &str, prefix: &str) -> Vec<String> {
    text.split("{{")
        .skip(1)
        .filter_map(|rest| rest.split("}}").next()?.trim().strip_prefix(prefix).map(str::to_owned))
        .collect()
}

#[test]
fn every_query_of_the_dashboard_uses_exported_metrics() {
    let metrics = Metrics::new().unwrap();
    let dashboard = dashboard();
    let mut queries = 0;
    for panel in panels(&dashboard) {
        let title = &panel["title"];
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().unwrap();
            let labels = check(&metrics, expression).unwrap_or_else(|e| panic!("{title}: {e}"));
            for name in placeholders(target["legendFormat"].as_str().unwrap(), "") {
                assert!(labels.contains(&name), "{title}: no label {name} in {expression}");
            }
            queries += 1;
        }
    }
    assert!(queries > 60, "{queries} queries");
    for annotation in dashboard["annotations"]["list"].as_array().unwrap() {
        check(&metrics, annotation["expr"].as_str().unwrap()).unwrap();
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        let Some(query) = variable["query"]["query"].as_str() else { continue };
        let inner = query.strip_prefix("label_values(").and_then(|q| q.strip_suffix(')')).unwrap();
        let (metric, label) = inner.split_once(", ").unwrap();
        assert!(check(&metrics, metric).unwrap().contains(label), "{query}");
    }
}

#[test]
fn panels_are_laid_out_on_the_grid() {
    let dashboard = dashboard();
    let mut ids = BTreeSet::new();
    let mut taken = BTreeSet::new();
    for panel in panels(&dashboard) {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id is not unique");
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(at("w") > 0 && at("h") > 0 && at("x") + at("w") <= 24, "{title}: off the grid");
        for x in at("x")..at("x") + at("w") {
            for y in at("y")..at("y") + at("h") {
                assert!(taken.insert((x, y)), "{title}: overlaps at {x}, {y}");
            }
        }
        if !is_row(panel) {
            assert!(panel["description"].as_str().is_some_and(|d| d.ends_with('.')), "{title}");
            assert!(panel["fieldConfig"]["defaults"]["unit"].is_string(), "{title}: no unit");
        }
    }
    assert!(ids.len() > 40, "{} panels", ids.len());
}

#[test]
fn every_panel_uses_the_variable_data_source() {
    let dashboard = dashboard();
    assert_eq!(dashboard["uid"], "hone");
    assert!(dashboard["id"].is_null());
    let check_source = |owner: &Value, what: &str| {
        assert_eq!(owner["datasource"]["uid"], "${datasource}", "{what}");
    };
    for panel in panels(&dashboard).into_iter().filter(|p| !is_row(p)) {
        let title = panel["title"].as_str().unwrap();
        check_source(panel, title);
        let targets = panel["targets"].as_array().unwrap();
        let refs: BTreeSet<_> = targets.iter().map(|t| t["refId"].as_str().unwrap()).collect();
        assert!(!targets.is_empty() && refs.len() == targets.len(), "{title}: refId");
        for target in targets {
            check_source(target, title);
            let expression = target["expr"].as_str().unwrap();
            assert!(expression.contains("instance=~\"$instance\""), "{title}: {expression}");
            // A fixed range shows gaps or wrong rates when the dashboard is zoomed.
            let ranges = expression.matches('[').count();
            let flexible = expression.matches("[$__rate_interval]").count()
                + expression.matches("[$__range]").count();
            assert_eq!(ranges, flexible, "{title}: {expression}");
        }
    }
    for annotation in dashboard["annotations"]["list"].as_array().unwrap() {
        check_source(annotation, "annotation");
    }
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    assert_eq!(variables[0]["name"], "datasource");
    assert_eq!(variables[0]["type"], "datasource");
    for variable in variables.iter().skip(1) {
        check_source(variable, "variable");
    }
}

/// One rule of `alerts.yml`: the lines from its `- alert:` to the next.
struct Rule {
    name: String,
    expression: String,
    text: String,
}

/// Reads the rules without a YAML parser, because `promtool` checks the syntax.
fn rules() -> Vec<Rule> {
    let text = fs::read_to_string(root().join("dashboards/alerts.yml")).unwrap_or_default();
    text.split("- alert:")
        .skip(1)
        .map(|rule| {
            let name = rule.lines().next().unwrap_or_default().trim().to_owned();
            let after = rule.split_once("expr:").map(|(_, rest)| rest).unwrap_or_default();
            let mut lines = after.lines();
            let first = lines.next().unwrap_or_default().trim();
            let expression = if first == "|" {
                let key =
                    |l: &str| ["for:", "labels:", "annotations:"].iter().any(|k| l.starts_with(k));
                lines.map(str::trim).take_while(|l| !key(l)).collect::<Vec<_>>().join("\n")
            } else {
                first.to_owned()
            };
            Rule { name, expression, text: rule.to_owned() }
        })
        .collect()
}

#[test]
fn every_alert_uses_exported_metrics() {
    let metrics = Metrics::new().unwrap();
    let rules = rules();
    assert!(rules.len() >= 15, "{} rules", rules.len());
    let names: BTreeSet<&str> = rules.iter().map(|r| r.name.as_str()).collect();
    assert_eq!(names.len(), rules.len());
    for Rule { name, expression, text } in &rules {
        let labels = check(&metrics, expression).unwrap_or_else(|e| panic!("{name}: {e}"));
        for label in placeholders(text, "$labels.") {
            assert!(labels.contains(&label), "{name}: no label {label} in {expression}");
        }
        assert!(text.contains("summary:") && text.contains("description:"), "{name}");
        let severity = ["page", "ticket", "info"];
        assert!(severity.iter().any(|s| text.contains(&format!("severity: {s} }}"))), "{name}");
    }
}

#[test]
fn every_alert_links_to_its_section_of_the_runbook() {
    let runbook = fs::read_to_string(root().join("docs/runbook.md")).unwrap();
    let sections: Vec<(&str, &str)> =
        runbook.split("\n## ").skip(1).filter_map(|section| section.split_once('\n')).collect();
    let rules = rules();
    let names: Vec<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(sections.iter().map(|(name, _)| *name).collect::<Vec<_>>(), names);
    for (name, text) in sections {
        for part in ["- **Cause.** ", "- **Check.** ", "- **Action.** "] {
            assert!(text.contains(part), "{name}: {part}");
        }
    }
    for Rule { name, text, .. } in rules {
        let link = format!("runbook_url: docs/runbook.md#{}\n", name.to_lowercase());
        assert!(text.contains(&link), "{name}");
    }
}

/// Runs `promtool` in `dashboards/` with `input` on stdin. Reports and returns `None` if it is not
/// installed.
fn promtool(arguments: &[&str], input: &str) -> Option<Result<(), String>> {
    if !has_program("promtool") {
        skip(&format!("promtool is not on the PATH: {arguments:?}"));
        return None;
    }
    let spawned = Command::new("promtool")
        .args(arguments)
        .current_dir(root().join("dashboards"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => return Some(Err(error.to_string())),
    };
    let written = child.stdin.take().map(|mut stdin| stdin.write_all(input.as_bytes()));
    let ended = child.wait_with_output();
    Some(match (written, ended) {
        (Some(Ok(())), Ok(output)) if output.status.success() => Ok(()),
        (_, Ok(output)) => Err(format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )),
        (_, Err(error)) => Err(error.to_string()),
    })
}

/// Writes a sample of a metric in the format of `Metrics::encode`.
fn sample(text: &mut String, description: &MetricDescription) -> std::fmt::Result {
    let MetricDescription { name, help, kind, labels } = description;
    let pairs: Vec<String> = labels.iter().map(|l| format!("{l}=\"x\"")).collect();
    let pairs = pairs.join(",");
    writeln!(text, "# HELP {name} {help}")?;
    match kind {
        MetricKind::Counter => writeln!(text, "# TYPE {name} counter\n{name}{{{pairs}}} 1"),
        MetricKind::Gauge => writeln!(text, "# TYPE {name} gauge\n{name}{{{pairs}}} 1"),
        MetricKind::Histogram => writeln!(
            text,
            "# TYPE {name} histogram\n{name}_bucket{{{pairs},le=\"+Inf\"}} 1\n\
             {name}_sum{{{pairs}}} 1\n{name}_count{{{pairs}}} 1"
        ),
    }
}

#[test]
fn promtool_accepts_the_metrics() {
    let metrics = Metrics::new().unwrap();
    let mut text = metrics.encode().unwrap();
    for description in metrics.descriptions() {
        if !text.contains(&format!("# TYPE {} ", description.name)) {
            sample(&mut text, description).unwrap();
        }
    }
    if let Some(result) = promtool(&["check", "metrics"], &text) {
        assert_eq!(result, Ok(()));
        // It refuses metrics that violate the conventions.
        let broken = "# HELP hone_things Things.\n# TYPE hone_things counter\nhone_things 1\n";
        assert!(promtool(&["check", "metrics"], broken).is_some_and(|r| r.is_err()));
    }
}

#[test]
fn promtool_accepts_the_rules_and_their_tests() {
    for arguments in [
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts.test.yml"],
        ["check", "config", "../deploy/prometheus.yml"],
    ] {
        if let Some(result) = promtool(&arguments, "") {
            assert_eq!(result, Ok(()), "{arguments:?}");
        }
    }
}

#[test]
fn compose_mounts_files_that_exist() {
    let deploy = root().join("deploy");
    for (file, count) in [("compose.yaml", 4), ("compose-fleet.yaml", 1)] {
        let text = fs::read_to_string(deploy.join(file)).unwrap();
        let mounts: Vec<&str> = text
            .lines()
            .filter_map(|l| l.trim().strip_prefix("- "))
            .filter(|l| l.starts_with("./") || l.starts_with("../"))
            .filter_map(|l| l.split(':').next())
            .collect();
        assert_eq!(mounts.len(), count, "{file}: {mounts:?}");
        for mount in mounts {
            assert!(Path::new(&deploy).join(mount).exists(), "{mount}");
        }
    }
}
