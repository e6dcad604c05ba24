use std::collections::BTreeSet;

use super::*;
use crate::kinds::Shaping;

fn part(toml: &str) -> Result<RewardConfig, String> {
    toml::from_str(toml).map_err(|e: toml::de::Error| e.message().to_owned())
}

fn refusal(toml: &str) -> String {
    match part(toml) {
        Err(message) => message,
        Ok(part) => part.check().map_err(|problem| problem.sentence()).unwrap_err(),
    }
}

#[test]
fn a_written_part_is_read_back() {
    for parameters in [
        "kind = 'feedback'",
        "kind = 'exact_match'\nignore_case = true",
        "kind = 'json_schema'\nschema = { type = 'object', properties = { a = { type = 'integer' } } }",
        "kind = 'json_schema'\nschema_from = 'schema'",
        "kind = 'repetition_penalty'\nunit = 'tokens'\nscale = 0.5\nclip = [-0.5, 0]",
        "kind = 'length_range'\nmax = 5\nadaptive = { up = 2.0, min = 0.1 }",
        "kind = 'ensemble'\nhow = 'median'\noffset = 1\nof = [{ kind = 'keywords' }, { kind = 'length', ideal = 1, spread = 2, clip = [0, 1] }]",
    ] {
        let read = part(&format!("name = 'p'\nweight = 0.5\n{parameters}")).unwrap();
        read.check().unwrap();
        let text = toml::to_string(&read).unwrap();
        assert_eq!(part(&text).unwrap(), read, "{text}");
    }
}

#[test]
fn mistakes_name_the_key_the_value_and_what_is_allowed() {
    let mut messages = Vec::new();
    for lines in [
        "kind = 'regex'\npattern = 'a'\ncount = 0",
        "kind = 'fuzzy_match'\nthreshold = 1.5",
        "kind = 'format_strict'\ntags = []",
        "kind = 'format_soft'\ntags = ['a', 'a']",
        "kind = 'format_incremental'\ntags = ['<a>']",
        "kind = 'json_schema'",
        "kind = 'json_schema'\nschema = '{}'\nschema_from = 'a'",
        "kind = 'length_range'\nmin = 6\nmax = 5",
        "kind = 'cosine_scaled'\nmax_tokens = 10\nmin_correct = 2",
        "kind = 'soft_overlong'\nmax_tokens = 10\ncache = 11",
        "kind = 'repetition_penalty'\nmax_penalty = 1",
        "kind = 'forbidden_phrases'\nphrases = ['a', ' ']",
        "kind = 'multiple_choice'\nchoices = 1",
        "kind = 'contains'\nmode = 'some'",
        "kind = 'think_format'\ntags = ['a']",
        "kind = 'think_format'\nclip = [1, 0]",
        "kind = 'think_format'\nscale = inf",
        "kind = 'think_format'\nadaptive = { low = 0.9 }",
        "kind = 'think_format'\nadaptive = { lo = 0.9 }",
        "kind = 'think_format'\nweight = -1\nadaptive = {}",
        "kind = 'ensemble'\nof = []",
        "kind = 'ensemble'\nof = [{ kind = 'magic' }]",
        "kind = 'ensemble'\nof = [{ kind = 'length', ideal = 1, spread = 0 }]",
        "kind = 'ensemble'\nof = [{ kind = 'think_format', weight = 2 }]",
        "kind = 'ensemble'\nof = [{ kind = 'ensemble', of = [{ kind = 'think_format' }] }]",
    ] {
        let message = refusal(&format!("name = 'p'\n{lines}"));
        // The list of kinds is long, and `tests/config_load.rs` checks it.
        let kinds: Vec<String> =
            crate::catalogue().iter().map(|entry| format!("\"{}\"", entry.kind)).collect();
        let all = hone_core::config::describe::one_of(&kinds);
        messages.push(message.replace(&all, "one of the kinds"));
    }
    insta::assert_snapshot!(messages.join("\n"), @r#"
    count is 0: it must be from 1 to 1000
    threshold is 1.5: it must be from 0 to 1
    tags is a list of 0: it must be a list of 1 to 16 names of tags
    tags[1] is "a": it must be 1 to 64 letters, digits, '_' or '-', each tag once
    tags[0] is "<a>": it must be 1 to 64 letters, digits, '_' or '-', each tag once
    schema is missing: give it, or schema_from
    schema_from is "a": it must be absent where schema is given
    min is 6: it must be from 0 to 5
    min_correct is 2: it must be at most max_correct (1)
    cache is 11: it must be from 0 to 10
    max_penalty is 1: it must be a finite number, 0 or less
    phrases[1] is " ": it must be a text that is not blank
    choices is 1: it must be from 2 to 26
    mode is "some": it must be "all" or "any"
    tags is not a key: nothing is allowed there
    clip is [1, 0]: it must be two finite numbers, the lower first
    scale is inf: it must be a finite number
    adaptive.low is 0.9: it must be from 0 to 0.8
    adaptive.lo is not a key: did you mean adaptive.low?
    weight is -1: it must be greater than 0
    of is a list of 0: it must be a list of 1 to 16 rewards
    of[0].kind is "magic": it must be one of the kinds
    of[0].spread is 0: it must be from 1 to 1048576
    of[0].weight is not a key: nothing is allowed there
    of[0].kind is "ensemble": it must be a kind that computes its value, and no ensemble
    "#);
}

#[test]
fn presets_are_valid_and_their_names_are_distinct() {
    for preset in Preset::ALL {
        let parts = preset.parts();
        assert!((3..=6).contains(&parts.len()), "{preset:?}");
        let names: BTreeSet<&str> = parts.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(names.len(), parts.len(), "{preset:?}");
        for part in &parts {
            part.check().unwrap();
            assert!(part.weight > 0.0 && part.weight <= 2.0, "{preset:?}: {}", part.name);
        }
    }
}

#[test]
fn a_route_without_a_preset_has_the_parts_of_the_file() {
    let route = RouteList::default().0.remove(0);
    assert_eq!(route.parts(), route.rewards);
    let route: RouteConfig = toml::from_str("name = 'r'\npreset = 'summarization'").unwrap();
    assert_eq!(route.parts(), Preset::Summarization.parts());
    assert_eq!(toml::from_str::<RouteConfig>(&toml::to_string(&route).unwrap()).unwrap(), route);
}

#[test]
fn no_kind_has_a_parameter_with_a_reserved_name() {
    for entry in crate::catalogue() {
        let text = format!("name = 'p'\nkind = '{}'\n{}", entry.kind, entry.example);
        let parameters = part(&text).unwrap().kind.to_json().unwrap();
        for key in ["name", "kind", "weight", "adaptive"].iter().chain(&Shaping::KEYS) {
            assert!(parameters.get(*key).is_none(), "{}: {key}", entry.kind);
        }
    }
}
