//! The document is valid, and `docs/http.md` mentions what it contains.

use std::collections::BTreeSet;

use regex::Regex;
use serde_json::{Value, json};

use super::table::{self, ApiRoute, RequestShape, describe, template};
use crate::body::{Field, fields_of};
use crate::config::ServerConfig;

const TEXT: &str = include_str!("../../../../docs/http.md");

fn routes() -> Vec<ApiRoute> {
    table::routes(&ServerConfig::default())
}

/// The fields of a route's body and query.
fn fields(route: &ApiRoute) -> Vec<&'static Field> {
    let bodies = route.bodies.iter().filter_map(|(_, shape)| match shape {
        RequestShape::Fields(table) => Some(*table),
        RequestShape::Json(_) => None,
    });
    bodies.chain([route.query]).flat_map(fields_of).collect()
}

/// Calls `visit` with every object in a document.
fn walk(value: &Value, visit: &mut impl FnMut(&serde_json::Map<String, Value>)) {
    match value {
        Value::Object(map) => {
            visit(map);
            map.values().for_each(|value| walk(value, visit));
        }
        Value::Array(list) => list.iter().for_each(|value| walk(value, visit)),
        _ => {}
    }
}

#[test]
fn every_reference_leads_somewhere() {
    let document = describe(&routes());
    let mut found = 0;
    walk(&document, &mut |map| {
        if let Some(Value::String(reference)) = map.get("$ref") {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
            found += 1;
        }
    });
    assert!(found > 100, "{found} references");
}

#[test]
fn schemas_are_json_schemas_and_examples_follow_them() {
    let document = describe(&routes());
    let schemas = document["components"]["schemas"].as_object().unwrap();
    assert!(schemas.len() > 40, "{} schemas", schemas.len());
    for (name, schema) in schemas {
        assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'), "{name}");
        let valid = jsonschema::draft202012::meta::validate(schema);
        assert!(valid.is_ok(), "{name}: {valid:?}");
    }
    let mut examples = 0;
    walk(&document["paths"], &mut |map| {
        if let (Some(example), Some(schema)) = (map.get("example"), map.get("schema")) {
            let whole = json!({"allOf": [schema], "components": document["components"]});
            let validator = jsonschema::validator_for(&whole).unwrap();
            let errors: Vec<_> = validator.iter_errors(example).map(|e| e.to_string()).collect();
            assert!(errors.is_empty(), "{example}: {errors:?}");
            examples += 1;
        }
    });
    assert!(examples > 5, "{examples} examples");
}

#[test]
fn operations_are_named_and_have_their_parameters() {
    let mut ids = BTreeSet::new();
    let document = describe(&routes());
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(!id.is_empty() && ids.insert(id.to_owned()), "{method} {path}: {id:?}");
            assert!(!operation["summary"].as_str().unwrap().is_empty(), "{id}");
            let declared = operation["parameters"].as_array().unwrap().iter();
            let declared: BTreeSet<_> = declared
                .filter(|parameter| parameter["in"] == "path")
                .map(|parameter| format!("{{{}}}", parameter["name"].as_str().unwrap()))
                .collect();
            let parts = path.split('/').filter(|part| part.starts_with('{'));
            assert_eq!(declared, parts.map(str::to_owned).collect(), "{id}");
        }
    }
    assert_eq!(ids.len(), routes().len());
}

fn section(heading: &str) -> &'static str {
    let begin = TEXT.find(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("{heading}"));
    let rest = &TEXT[begin + 1..];
    &rest[..rest.find("\n## ").unwrap_or(rest.len())]
}

#[test]
fn the_text_mentions_every_route() {
    for route in routes() {
        let line = format!("{} {}", route.method, template(route.path));
        let is_mentioned = TEXT.match_indices(&line).any(|(at, _)| {
            let next = TEXT[at + line.len()..].chars().next();
            !next.is_some_and(|c| c == '/' || c.is_ascii_alphanumeric())
        });
        assert!(is_mentioned, "docs/http.md does not mention {line}");
    }
}

#[test]
fn the_text_mentions_every_field() {
    let mut found = 0;
    for route in routes() {
        let text = section(route.tag());
        for field in fields(&route) {
            let name = format!("`{}`", field.name);
            assert!(text.contains(&name), "docs/http.md, {}: {name} is missing", route.tag());
            found += 1;
        }
    }
    assert!(found > 120, "{found} fields");
}

/// The names in the first column of tables of fields and parameters, those of nested objects excepted.
fn names_in_tables(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_table = false;
    for line in text.lines() {
        let mut cells = line.split(" | ");
        let first = cells.next().unwrap_or_default().trim_start_matches("| ");
        if !line.starts_with('|') {
            is_table = false;
        } else if first.starts_with("field") || first.starts_with("parameter") {
            is_table = cells.next().is_some_and(|cell| cell.starts_with("value"));
            is_table &= !first.contains("[]");
        } else if is_table {
            names.extend(first.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    names.retain(|name| !name.contains('*'));
    names
}

#[test]
fn every_field_in_the_text_is_one() {
    let all = routes();
    let tags: BTreeSet<_> = all.iter().map(ApiRoute::tag).collect();
    let mut found = 0;
    for tag in tags {
        let known: BTreeSet<_> = all
            .iter()
            .filter(|route| route.tag() == tag)
            .flat_map(fields)
            .map(|f| f.name)
            .collect();
        for name in names_in_tables(section(tag)) {
            assert!(known.contains(name.as_str()), "docs/http.md, {tag}: {name} is no field");
            found += 1;
        }
    }
    assert!(found > 80, "{found} names");
}

#[test]
fn the_text_lists_the_codes_of_errors() {
    let document = describe(&routes());
    let known = document["components"]["schemas"]["ErrorCode"]["enum"].as_array().unwrap();
    let known: BTreeSet<_> = known.iter().map(|code| code.as_str().unwrap().to_owned()).collect();
    let row = Regex::new(r"(?m)^\| [45]\d\d \| (.*?) \|").unwrap();
    let cells = row.captures_iter(section("Errors")).map(|row| row.get(1).unwrap().as_str());
    let listed: BTreeSet<_> =
        cells.flat_map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_owned)).collect();
    assert_eq!(listed, known);
}
