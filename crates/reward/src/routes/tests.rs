use hone_core::metrics::Metrics;

use super::*;
use crate::kinds::tests::samples::{Broken, half, sample};
use crate::record;

fn routes(toml: &str) -> Result<Routes, RewardError> {
    let tables: BTreeMap<String, RouteList> = toml::from_str(toml).unwrap();
    Routes::new(&tables["route"])
}

fn error_of(rewards: &str) -> String {
    let text = format!("[[route]]\nname = \"math\"\n{rewards}");
    routes(&text).err().map(|e| e.to_string()).unwrap_or_default()
}

fn input(text: &str, metadata: &[(&str, &str)]) -> ScoreInput {
    ScoreInput { ids: vec![1; 4], ..sample(text, metadata) }
}

const ALL: &str = r#"
    [[route]]
    name = "math"
    model = "sums"
    metadata = { task = "add", user = "*" }
    [[route.reward]]
    name = "correct"
    kind = "numeric_match"
    weight = 2.0
    [[route.reward]]
    name = "same"
    kind = "exact_match"
    [[route.reward]]
    name = "shape"
    kind = "format_strict"
    weight = 0.5
    [[route.reward]]
    name = "soft"
    kind = "format_incremental"
    [[route.reward]]
    name = "digits"
    kind = "regex"
    pattern = '\d'
    [[route.reward]]
    name = "brief"
    kind = "length"
    ideal = 8
    spread = 8
    [[route.reward]]
    name = "thumbs"
    kind = "feedback"
    [[route]]
    name = "rest"
"#;

#[tokio::test]
async fn a_route_grades_with_every_part_except_feedback() {
    let routes = routes(ALL).unwrap();
    let math = routes.get("math").unwrap();
    assert!(math.has_graders() && math.has_feedback());
    assert!(math.takes_feedback("thumbs"));
    assert!(!math.takes_feedback("correct"), "a client cannot post a grader's part");
    assert!(math.feedback("thumbs").is_some() && math.feedback("correct").is_none());
    assert_eq!((math.weight("correct"), math.weight("nothing")), (Some(2.0), None));
    let good = "<reasoning>6+1</reasoning><answer>7</answer>";
    let inputs = [input(good, &[("answer", "7.0")]), input("none", &[])];
    let grades = math.grade(&inputs).await;
    let expected: Vec<(String, Vec<Option<f64>>)> = [
        ("correct", [Some(1.0), None]),
        ("same", [Some(0.0), None]),
        ("shape", [Some(1.0), Some(0.0)]),
        ("soft", [Some(1.0), Some(0.0)]),
        ("digits", [Some(1.0), Some(0.0)]),
        ("brief", [Some(0.5), Some(0.5)]),
    ]
    .into_iter()
    .map(|(name, values)| (name.to_owned(), values.to_vec()))
    .collect();
    assert_eq!(grades, expected);
    let rest = routes.get("rest").unwrap();
    assert!(!rest.has_graders() && !rest.has_feedback());
    assert!(rest.grade(&inputs).await.is_empty());
}

#[test]
fn the_first_matching_route_is_found() {
    let routes = routes(ALL).unwrap();
    let found = |model: &str, metadata: &[(&str, &str)]| {
        let metadata = input("", metadata).metadata;
        routes.find(model, &metadata).map(|route| route.name.clone()).unwrap()
    };
    assert_eq!(found("sums", &[("task", "add"), ("user", "ann")]), "math");
    assert_eq!(found("sums", &[("task", "add")]), "rest", "`*` requires a value");
    assert_eq!(found("sums", &[("task", "mul"), ("user", "ann")]), "rest");
    assert_eq!(found("default", &[("task", "add"), ("user", "ann")]), "rest");
    assert_eq!(routes.iter().count(), 2);
}

#[test]
fn the_default_routes_learn_from_thumbs() {
    let routes = Routes::new(&RouteList::default()).unwrap();
    let route = routes.find("any", &BTreeMap::new()).unwrap();
    assert!(route.takes_feedback("thumbs") && !route.has_graders());
}

#[test]
fn errors_name_the_route_the_part_and_the_key() {
    let part = |rest: &str| format!("[[route.reward]]\nname = \"p\"\n{rest}\n");
    for (config, wanted) in [
        (
            part("kind = \"regex\"\npattern = \"(\""),
            "route `math`, reward `p`: pattern is `(`: it must be a regular expression (unclosed group)",
        ),
        (
            part("kind = \"exact_match\"\nextract = \"[\""),
            "route `math`, reward `p`: extract is `[`: it must be a regular expression (unclosed character class)",
        ),
        (
            part("kind = \"numeric_match\"\nextract = \"a+\""),
            "route `math`, reward `p`: extract is `a+`: it must be a pattern with a group",
        ),
        (
            part("kind = \"numeric_match\"\ntolerance = -1.0"),
            "route `math`, reward `p`: tolerance is -1: it must be a finite number, 0 or more",
        ),
        (
            part("kind = \"length\"\nideal = 5\nspread = 0"),
            "route `math`, reward `p`: spread is 0: it must be from 1 to 1048576",
        ),
        (
            part("kind = \"feedback\"\nweight = nan"),
            "route `math`, reward `p`: weight is NaN: it must be a finite number",
        ),
        (
            part("kind = \"language\"\nlanguage = \"en\""),
            "route `math`, reward `p`: language is \"en\": it must be an ISO 639-3 code",
        ),
        (
            part("kind = \"json_schema\"\nschema = { type = 5 }"),
            "route `math`, reward `p`: schema is not a JSON schema: ",
        ),
        (
            part("kind = \"json_schema\"\nschema = \"{\""),
            "route `math`, reward `p`: schema is not a JSON schema: EOF",
        ),
        (
            part("kind = \"json_schema\"\nschema = { pattern = \"(?=a)\" }"),
            "route `math`, reward `p`: schema is not a JSON schema: ",
        ),
        (
            part("kind = \"ensemble\"\nof = [{ kind = \"regex\", pattern = \")\" }]"),
            "route `math`, reward `p`: of[0].pattern is `)`: it must be a regular expression",
        ),
        (
            part("kind = \"ensemble\"\nof = [{ kind = \"feedback\" }]"),
            "route `math`, reward `p`: of[0].kind is \"feedback\": it must be a kind that",
        ),
        (
            part("kind = \"feedback\"\nclip = [0, 1]"),
            "route `math`, reward `p`: kind is \"feedback\": clip, scale and offset shape what a",
        ),
        (
            part("kind = \"feedback\"\nadaptive = { max = 0.5 }"),
            "route `math`, reward `p`: adaptive.max is 0.5: it must be from 1 to ",
        ),
        (
            "[[route.reward]]\nname = \"\"\nkind = \"feedback\"".to_owned(),
            "route `math`, reward ``: name is \"\": it must be a name",
        ),
        (
            format!("{}{}", part("kind = \"feedback\""), part("kind = \"format_strict\"")),
            "route `math`: reward.name = `p` occurs twice",
        ),
        ("[[route]]\nname = \"math\"".to_owned(), "route: name = `math` occurs twice"),
        ("[[route]]\nname = \"\"".to_owned(), "route: name is \"\": it must be a name"),
    ] {
        let error = error_of(&config);
        assert!(error.starts_with(wanted), "{config}\nwas refused by: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
    let missing = routes(ALL).unwrap().require("rollout.dataset_route", "poems").err().unwrap();
    assert_eq!(
        missing.to_string(),
        "rollout.dataset_route = `poems` is not a route; routes are: math, rest"
    );
}

#[tokio::test]
async fn a_broken_grader_loses_its_own_values_only() {
    let part = |name: &str, grader: Arc<dyn RewardFn>| RewardPart {
        name: name.to_owned(),
        weight: 1.0,
        adaptive: None,
        grader: Some(grader),
        feedback: None,
        learned: None,
        kind: "test",
        reads: Vec::new(),
        models: Vec::new(),
        calls_out: false,
    };
    let route = Route {
        name: "r".to_owned(),
        store: true,
        parts: vec![
            part("panics", Arc::new(Broken { panics: true })),
            part("not finite", Arc::new(Broken { panics: false })),
            part("works", half()),
        ],
    };
    let inputs = vec![input("a", &[]), input("b", &[]), input("c", &[])];
    let grades = route.grade(&inputs).await;
    assert_eq!(grades[0].1, [None; 3]);
    assert_eq!(grades[1].1, [None; 3]);
    assert_eq!(grades[2].1, [Some(0.5); 3]);

    let metrics = Metrics::new().unwrap();
    for (name, values) in &grades {
        record(&metrics, &route.name, name, values.iter().copied());
    }
    assert_eq!(metrics.reward_missing.with_label_values(&["r", "panics"]).get(), 3);
    assert_eq!(metrics.reward_value.with_label_values(&["r", "works"]).get_sample_count(), 3);
    assert_eq!(metrics.reward_value.with_label_values(&["r", "panics"]).get_sample_count(), 0);
}

const COMPOSED: &str = r#"
    [[route]]
    name = "composed"
    preset = "math_reasoning"
    [[route.reward]]
    name = "length"
    kind = "length"
    ideal = 4
    spread = 4
    weight = 3.0
    scale = 2.0
    offset = -0.5
    clip = [-1.0, 1.0]
    adaptive = { low = 0.1, every = 8, max = 4.0 }
    [[route.reward]]
    name = "either"
    kind = "ensemble"
    how = "max"
    of = [
        { kind = "exact_match", extract = "" },
        { kind = "keywords" },
        { kind = "regex", pattern = "z", offset = 0.25 },
    ]
    [[route.reward]]
    name = "none"
    kind = "ensemble"
    of = [{ kind = "exact_match" }, { kind = "keywords" }]
"#;

#[tokio::test]
async fn presets_shapes_and_ensembles_combine() {
    let routes = routes(COMPOSED).unwrap();
    let route = routes.get("composed").unwrap();
    let names: Vec<&str> = route.parts.iter().map(|p| p.name.as_str()).collect();
    let wanted = ["correct", "format", "tags", "steps", "length", "repetition", "either", "none"];
    assert_eq!(names, wanted, "the preset's parts first, replaced in place");
    let length = &route.parts[4];
    assert_eq!(length.weight, 3.0);
    let mut weight = length.adaptive.clone().unwrap();
    weight.observe([Some(0.5); 8]);
    assert!((weight.weight() - 3.6).abs() < 1e-12);
    assert!(route.parts[0].adaptive.is_none());

    let samples =
        [input("7", &[("answer", "7")]), input("z", &[]), input("7", &[("keywords", "7, 8")])];
    let grades: BTreeMap<String, Vec<Option<f64>>> =
        route.grade(&samples).await.into_iter().collect();
    assert_eq!(grades["length"], [Some(1.0); 3], "2 x 1 - 0.5, clipped");
    assert_eq!(grades["either"], [Some(1.0), Some(1.25), Some(0.5)]);
    assert_eq!(grades["none"], [Some(1.0), None, Some(0.5)], "without tags all is the answer");
}

struct Lengths;

impl crate::kinds::TokenScorer for Lengths {
    fn score(&self, prompt: &[u32], completions: &[Vec<u32>]) -> Vec<Option<f64>> {
        completions.iter().map(|ids| Some((prompt.len() + ids.len()) as f64)).collect()
    }
}

#[tokio::test]
async fn a_learned_part_has_values_while_it_has_a_scorer() {
    let text = "[[route]]\nname = 'r'\n\
                [[route.reward]]\nname = 'thumbs'\nkind = 'feedback'\n\
                [[route.reward]]\nname = 'taste'\nkind = 'learned'\nof = 'thumbs'";
    let all = routes(text).unwrap();
    let route = all.get("r").unwrap();
    let inputs = [input("a", &[]), input("b", &[])];
    assert!(!route.has_graders() && !route.scores_shadows());
    assert!(route.takes_feedback("thumbs") && !route.takes_feedback("taste"));
    assert_eq!(route.grade_tokens(&[1, 2], &inputs).await, [("taste".to_owned(), vec![None; 2])]);
    let (_, part) = route.learned().next().unwrap();
    part.set_scorer(Some(Arc::new(Lengths)));
    assert!(!route.has_graders() && route.scores_shadows());
    let graded = route.grade_tokens(&[1, 2], &inputs).await;
    assert_eq!(graded, [("taste".to_owned(), vec![Some(6.0); 2])]);
    // An exam must not be decided by what the policy is trained on.
    assert!(route.grade(&inputs).await.is_empty());
    part.set_scorer(None);
    assert!(!route.scores_shadows());
    let wrong = error_of(&text.replace("of = 'thumbs'", "of = 'taste'"));
    assert_eq!(
        wrong,
        "route `r`, reward `taste`: of is \"taste\": it must be a feedback part of the route with values"
    );
}
