use super::*;

use crate::versions::VersionDecision;
use crate::{eval, task};

fn evaluation(text: &str, good: bool, version: u64) -> DemoEvaluation {
    let scored = |question| {
        [Decoding::Greedy, Decoding::Sampled].map(|decoding| ScoredAnswer {
            question,
            decoding,
            text: text.to_owned(),
            right: good,
            well_formed: good,
            reward: if good { task::REWARD_MAX } else { 0.0 },
        })
    };
    DemoEvaluation {
        answers: eval::held_out(4).into_iter().flat_map(scored).collect(),
        version: hone_core::types::PolicyVersion(version),
    }
}

fn findings() -> Findings {
    let mut tally = UserTally::default();
    for up in [true, true, false] {
        tally.requests += 1;
        tally.add_answer(1.0, Duration::from_millis(8), up);
        tally.add_thumb(up);
    }
    let before = evaluation("about\n40", false, 0);
    let after = evaluation("<reasoning>sum</reasoning><answer>1</answer>", true, 60);
    let report = DemoReport {
        reward_max: 1.5,
        reward_before: 0.0,
        reward_after: 1.5,
        held_out: held_out_rows(&before, &after),
        steps: 60,
        seconds_to_nine_tenths: Some(41.5),
        ratings_to_90: Some(900),
        swaps: 60,
        requests: 1203,
        failed_requests: 0,
        feedback: 3,
        kl: Some(0.084),
        wall_seconds: 108.0,
        ttft_p50_ms: Some(8.0),
        ttft_p99_ms: Some(8.0),
        ttft_idle_p50_ms: Some(8.0),
        ttft_idle_p99_ms: Some(8.0),
        ttft_busy_p50_ms: Some(8.0),
        ttft_busy_p99_ms: Some(8.0),
        feedback_to_policy_p50_seconds: Some(2.25),
        peak_rss_mib: Some(412.4),
        seed: 1,
        rewards: RewardsMode::Both,
        backend: EngineBackend::Mistralrs,
        sampler: SamplerKind::Auto,
        versions: None,
    };
    Findings { report, before, after, tally, cut_short: None }
}

#[test]
fn the_json_has_exactly_these_keys() {
    let json = serde_json::to_value(findings().report).unwrap();
    let keys = |value: &serde_json::Value| -> Vec<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    insta::assert_snapshot!(keys(&json).join(" "), @"reward_max reward_before reward_after held_out steps seconds_to_nine_tenths ratings_to_90 swaps requests failed_requests feedback kl wall_seconds ttft_p50_ms ttft_p99_ms ttft_idle_p50_ms ttft_idle_p99_ms ttft_busy_p50_ms ttft_busy_p99_ms feedback_to_policy_p50_seconds peak_rss_mib seed rewards backend sampler");
    let rows = json["held_out"].as_array().unwrap();
    let kinds: Vec<_> = rows.iter().map(|row| (&row["kind"], &row["decoding"])).collect();
    assert_eq!(
        serde_json::to_string(&kinds).unwrap(),
        r#"[["asked","greedy"],["asked","sampled"],["larger","greedy"],["larger","sampled"]]"#
    );
    let (n, interval) = (4, serde_json::json!({"low": 1.5, "high": 1.5}));
    let estimate = serde_json::json!({"mean": 1.5, "interval": interval, "n": n});
    assert_eq!((&rows[0]["after"]["reward"], &rows[0]["rise"]), (&estimate, &estimate));
    assert_eq!(keys(&rows[0]["before"]), ["reward", "right", "well_formed"]);
    assert_eq!((&json["rewards"], &json["backend"]), (&"both".into(), &"mistralrs".into()));
}

#[test]
fn the_report_as_text() {
    let findings = findings();
    let next = NextSteps { kept: Some("/data/demo".into()), serving: None };
    insta::assert_snapshot!([findings.table(), findings.facts(), next.render()].join("\n"), @r"
    held out                 reward, at most 1.5 (95 %)           right        well formed
    asked kind      greedy   0.00 (0.00–0.49) → 1.50 (1.50–1.50)  0 % → 100 %  0 % → 100 %
    asked kind      sampled  0.00 (0.00–0.49) → 1.50 (1.50–1.50)  0 % → 100 %  0 % → 100 %
    larger numbers  greedy   0.00 (0.00–0.49) → 1.50 (1.50–1.50)  0 % → 100 %  0 % → 100 %
    larger numbers  sampled  0.00 (0.00–0.49) → 1.50 (1.50–1.50)  0 % → 100 %  0 % → 100 %

    held out                4 questions of each kind, in neither pretraining nor training
    policy versions         0 before, 60 after
    learning                60 steps in 1:48 · 60 swaps · KL 0.084
    90 % of the maximum     after 41.5 s · 900 thumbs
    traffic                 1203 requests · 0 failed · 3 thumbs · 2 up
    first token, idle       p50 8.0 ms    p99 8.0 ms
    first token, training   p50 8.0 ms    p99 8.0 ms
    thumb to new policy     p50 2.2 s
    peak memory             412 MiB

    hone db stats --data /data/demo                    the contents of the ledger
    hone serve --config /data/demo/hone.toml           continue to serve and learn
    ");
    let samples = findings.samples();
    assert_eq!(samples.matches("✓ <reasoning>").count(), SAMPLES_SHOWN);
    assert_eq!(samples.matches("✗ about⏎40").count(), SAMPLES_SHOWN);
}

#[test]
fn decisions_about_versions_are_reported() {
    let mut findings = findings();
    assert!(!findings.facts().contains("rolled back"));
    let decision = |version, decision, detail: &str| VersionDecision {
        version,
        decision,
        detail: detail.to_owned(),
        sabotaged: false,
    };
    findings.report.versions = Some(VersionHistory {
        promoted: 1,
        rolled_back: 1,
        decisions: vec![
            decision(1, DecisionKind::Promoted, "canary/ratings: not worse"),
            decision(2, DecisionKind::RolledBack, "canary/ratings: worse"),
        ],
        ..VersionHistory::default()
    });
    let facts = findings.facts();
    let lines: Vec<&str> = facts.lines().filter(|line| line.contains("rolled back")).collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    versions                1 promoted · 0 rejected · 1 rolled back
    rolled back             version 2 · canary/ratings: worse
    ");
    let json = serde_json::to_value(&findings.report).unwrap();
    assert_eq!(json["versions"]["rolled_back"], 1);
    assert_eq!(json["versions"]["decisions"][1]["decision"], "rolled_back");
}

#[test]
fn a_rise_within_its_interval_is_no_improvement() {
    let good = evaluation("", true, 1);
    let mut mixed = evaluation("", false, 0);
    let improved = |before: &DemoEvaluation, after: &DemoEvaluation| {
        let report = DemoReport { held_out: held_out_rows(before, after), ..findings().report };
        report.improved()
    };
    assert!(improved(&mixed, &good));
    assert!(!improved(&good, &good));
    // One of four answers improves.
    let mut better = mixed.clone();
    better.answers[1].reward = 1.5;
    assert!(!improved(&mixed, &better), "as likely chance");
    mixed.answers.clear();
    assert!(!improved(&mixed, &good), "nothing to compare");
}

mod dir {
    use super::super::*;

    #[test]
    fn a_temporary_directory_is_removed_and_a_named_one_is_kept() {
        let home = DemoDir::open(None).unwrap();
        let dir = home.path.clone();
        std::fs::write(dir.join("ledger"), "x").unwrap();
        drop(home);
        assert!(!dir.exists());

        let parent = tempfile::tempdir().unwrap();
        let named = parent.path().join("a/b");
        drop(DemoDir::open(Some(&named)).unwrap());
        assert!(named.is_dir());
        std::fs::write(named.join("ledger"), "x").unwrap();
        let error = DemoDir::open(Some(&named)).err().unwrap().to_string();
        assert!(error.contains("is not empty"), "{error}");
    }
}
