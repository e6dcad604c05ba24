use hone_reward::Routes;
use hone_reward::routes::RouteList;

use super::*;
use crate::tests::world::{interaction, served};

fn route() -> Arc<Route> {
    let text = r#"
        [[route]]
        name = "math"
        reward = [
            { name = "thumbs", kind = "feedback" },
            { name = "correct", kind = "numeric_match" },
            { name = "shape", kind = "format_strict" },
            { name = "stars", kind = "feedback" },
        ]
    "#;
    let tables: BTreeMap<String, RouteList> = toml::from_str(text).unwrap();
    let routes = Routes::new(&tables["route"]).unwrap();
    Arc::clone(routes.get("math").unwrap())
}

fn sample(interaction: &Interaction, version: u64) -> Sample {
    Sample { version: PolicyVersion(version), ..served(interaction, 0) }
}

fn feedback(sample: &Sample, name: &str) -> (SampleId, Vec<Reward>) {
    let reward = Reward::graded(sample.id, name, Some(1.0));
    (sample.id, vec![Reward { source: RewardSource::Feedback, ..reward }])
}

fn grades(correct: &[Option<f64>], shape: &[Option<f64>]) -> Grades {
    vec![("correct".to_owned(), correct.to_vec()), ("shape".to_owned(), shape.to_vec())]
}

#[test]
fn a_group_has_its_members_parts_in_order_and_the_oldest_version() {
    let asked = interaction("math");
    let members = [sample(&asked, 7), sample(&asked, 5), sample(&asked, 6)];
    let values = grades(&[Some(0.0), Some(1.0), None], &[Some(0.0); 3]);
    let open = Feedback::from([feedback(&members[0], "stars")]);
    let group = build_group(&asked, &route(), &members, &values, &open);
    assert_eq!(group.members, members.each_ref().map(|m| m.id));
    assert_eq!(group.parts, ["correct", "shape", "stars"]);
    assert_eq!(group.oldest_version, PolicyVersion(5));
    assert_eq!(group.state, GroupState::Ready);
    assert_eq!((group.interaction, group.route.as_str()), (asked.id, "math"));
}

#[test]
fn members_without_a_value_are_left_out() {
    let asked = interaction("math");
    let members = [sample(&asked, 1), sample(&asked, 0), sample(&asked, 3)];
    let none = [None; 3];
    let group = build_group(
        &asked,
        &route(),
        &members,
        &grades(&none, &[Some(1.0), None, None]),
        &Feedback::new(),
    );
    assert_eq!(group.members, [members[0].id], "a missing reward is not 0");
    assert_eq!(group.parts, ["shape"]);
    assert_eq!(group.oldest_version, PolicyVersion(1), "of the remaining members");

    let open = Feedback::from([feedback(&members[2], "thumbs")]);
    let group = build_group(&asked, &route(), &members, &grades(&none, &none), &open);
    assert_eq!(group.members, [members[2].id], "feedback is a value too");
    assert_eq!(group.parts, ["thumbs"]);

    let group = build_group(&asked, &route(), &members, &grades(&none, &none), &Feedback::new());
    assert_eq!(group.state, GroupState::Dropped("unscored".to_owned()));
    assert!(group.parts.is_empty(), "naming a part would clear its later feedback");
}

#[test]
fn all_grader_values_are_recorded_including_missing_ones() {
    let asked = interaction("math");
    let members = [sample(&asked, 0), sample(&asked, 0)];
    let values = grades(&[Some(1.0), None], &[Some(0.0), Some(1.0)]);
    let recorded: Vec<_> =
        grader_rewards(&members, &values).map(|r| (r.sample, r.name, r.value, r.source)).collect();
    let expected = [
        (members[0].id, "correct", Some(1.0)),
        (members[1].id, "correct", None),
        (members[0].id, "shape", Some(0.0)),
        (members[1].id, "shape", Some(1.0)),
    ];
    assert_eq!(recorded.len(), expected.len());
    for (got, (id, name, value)) in recorded.into_iter().zip(expected) {
        assert_eq!(got, (id, name.to_owned(), value, RewardSource::Grader));
    }
}

#[test]
fn a_total_is_missing_if_a_part_is_missing() {
    let grades: Grades = vec![
        ("correct".to_owned(), vec![Some(1.0), Some(0.0), None]),
        ("shape".to_owned(), vec![Some(1.0), Some(1.0), Some(1.0)]),
    ];
    assert_eq!(total_rewards(&route(), 3, &grades), [Some(2.0), Some(1.0), None]);
    assert_eq!(total_rewards(&route(), 4, &grades)[3], None, "a member that was not graded");
}
