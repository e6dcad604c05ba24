//! The pages of a small ledger, drawn on a terminal in memory.

use std::path::Path;
use std::sync::Arc;

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use hone_core::metrics::Metrics;
use hone_core::testing;
use hone_core::types::{Interaction, Message, PromptSource, Reward, Role, StepRecord};
use hone_store::{Op, Store, StoreConfig};

use super::*;

fn inspector(dir: &Path) -> Inspector {
    let path = dir.join("ledger.redb");
    let store =
        Store::open(&path, &StoreConfig::default(), Arc::new(Metrics::new().unwrap())).unwrap();
    let mut ops = Vec::new();
    for version in 0..3 {
        ops.push(Op::Policy(Box::new(testing::policy(version, version.saturating_sub(1)))));
    }
    let message = Message::new(Role::User, "What is 1 + 1?\u{1b}[31m");
    let prompt = Interaction::new(PromptSource::Live, "default", vec![message]);
    ops.push(Op::Interaction(Box::new(prompt.clone())));
    let mut members = Vec::new();
    for (version, text) in [(1, "It is 2."), (2, "Two,\nI think.")] {
        let version = PolicyVersion(version);
        let sample = Sample::new(prompt.id, SampleOrigin::Served, version);
        let sample = Sample { text: text.into(), ids: vec![1], logprobs: vec![-0.5], ..sample };
        ops.push(Op::Sample(Box::new(sample.clone())));
        ops.push(Op::Reward(Box::new(Reward::graded(sample.id, "exact", Some(0.75)))));
        members.push(sample);
    }
    let group = testing::group("default", "exact", &members[..1]);
    ops.push(Op::Group(Box::new(group.clone())));
    let metrics = [("reward_mean".to_owned(), 0.75)].into();
    ops.push(Op::Step(Box::new(StepRecord {
        step: 1,
        groups: vec![group.id],
        metrics,
        created: 1000,
    })));
    store.commit_blocking(ops).unwrap();
    drop(store);
    Inspector::new(Ledger::open_read_only(&path).unwrap()).unwrap()
}

fn screen(inspector: &Inspector) -> String {
    let mut terminal = Terminal::new(TestBackend::new(100, 24)).unwrap();
    terminal.draw(|frame| render(frame, inspector.pages.last().unwrap())).unwrap();
    terminal.backend().to_string()
}

#[test]
fn keys_lead_from_versions_and_steps_to_a_completion_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut inspector = inspector(dir.path());
    let shown = screen(&inspector);
    assert!(
        shown.contains("versions") && shown.contains("parent") && shown.contains("q quit"),
        "{shown}"
    );

    // The newest version is first; the second one is version 1.
    inspector.press(KeyCode::Down).unwrap();
    inspector.press(KeyCode::Enter).unwrap();
    let shown = screen(&inspector);
    assert!(shown.contains("1 completions of version 1") && shown.contains("It is 2."), "{shown}");
    inspector.press(KeyCode::Enter).unwrap();
    let shown = screen(&inspector);
    for part in ["user", "What is 1 + 1?␛[31m", "completion", "exact  0.750", "id  cmpl-"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    inspector.press(KeyCode::Down).unwrap();
    assert!(!screen(&inspector).contains("user"), "the text moves by a line");
    inspector.press(KeyCode::Esc).unwrap();
    inspector.press(KeyCode::Esc).unwrap();
    assert_eq!(inspector.pages.len(), 1);
    assert_eq!(inspector.pages[0].position, 1, "the selection stays");

    inspector.press(KeyCode::Char('2')).unwrap();
    assert!(screen(&inspector).contains("0.750"), "{}", screen(&inspector));
    inspector.press(KeyCode::Enter).unwrap();
    assert!(screen(&inspector).contains("1 completions of step 1"), "{}", screen(&inspector));
    inspector.press(KeyCode::Char('3')).unwrap();
    let shown = screen(&inspector);
    assert!(shown.contains("2 completions") && shown.contains("Two,⏎I think."), "{shown}");
    for key in [KeyCode::End, KeyCode::PageDown, KeyCode::Down, KeyCode::Home, KeyCode::Up] {
        inspector.press(key).unwrap();
    }
    assert_eq!(inspector.pages[0].position, 0);
    inspector.press(KeyCode::Char('q')).unwrap();
    assert!(inspector.pages.is_empty());
}
