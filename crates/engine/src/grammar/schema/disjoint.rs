//! Finds out whether no value satisfies two schemas at once.

use std::collections::BTreeMap;

use serde_json::Value;

use super::values::resolve;

/// Schemas that are read to find the facts of one.
const MAX_READ: usize = 500;
/// Pairs of listed values that are compared to find one that two schemas share.
const MAX_PAIRS: usize = 1000;

/// The JSON types, each a bit at its place. An integer is a number.
const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];
const ALL: u8 = 63;
const OBJECT: u8 = 32;

/// What every value of a schema has in common.
struct CommonFacts<'a> {
    /// The possible types.
    types: u8,
    /// The possible values, if the schema lists them.
    literals: Option<&'a [Value]>,
    /// The possible values of required properties that list them.
    properties: BTreeMap<&'a str, &'a [Value]>,
}

impl<'a> CommonFacts<'a> {
    /// The facts of a schema. `left` is the number of schemas that may be read.
    fn of(root: &'a Value, schema: &'a Value, left: &mut usize) -> Self {
        let mut facts = Self { types: ALL, literals: None, properties: BTreeMap::new() };
        facts.add(root, schema, left);
        facts
    }

    /// Adds what a schema says about the same values.
    fn add(&mut self, root: &'a Value, schema: &'a Value, left: &mut usize) {
        let Some(rest) = left.checked_sub(1) else { return };
        *left = rest;
        if *schema == Value::Bool(false) {
            self.types = 0;
        }
        for (key, value) in schema.as_object().into_iter().flatten() {
            match (key.as_str(), value) {
                ("type", Value::Array(names)) => {
                    self.types &= names.iter().map(bit).fold(0, |all, bit| all | bit);
                }
                ("type", name) => self.types &= bit(name),
                ("const", value) => self.restrict(std::slice::from_ref(value)),
                ("enum", Value::Array(values)) => self.restrict(values),
                ("allOf", Value::Array(all)) => {
                    all.iter().for_each(|part| self.add(root, part, left));
                }
                ("$ref", Value::String(reference)) => {
                    if let Some((_, target)) = resolve(root, reference) {
                        self.add(root, target, left);
                    }
                }
                ("required", Value::Array(names)) => {
                    for name in names.iter().filter_map(Value::as_str) {
                        let property = schema.get("properties").and_then(|all| all.get(name));
                        let facts = property.map(|schema| Self::of(root, schema, left));
                        if let Some(literals) = facts.and_then(|facts| facts.literals) {
                            self.properties.entry(name).or_insert(literals);
                        }
                    }
                }
                _ => {}
            }
        }
    }

    fn restrict(&mut self, values: &'a [Value]) {
        self.types &= values.iter().map(type_bit).fold(0, |all, bit| all | bit);
        self.literals.get_or_insert(values);
    }

    fn is_disjoint(&self, other: &Self) -> bool {
        let common = self.types & other.types;
        let differ = |own: Option<&[Value]>, others: Option<&[Value]>| {
            own.zip(others).is_some_and(|(own, others)| !share_a_value(own, others))
        };
        let mut properties = self.properties.iter();
        common == 0
            || differ(self.literals, other.literals)
            || common == OBJECT
                && properties
                    .any(|(name, own)| differ(Some(own), other.properties.get(name).copied()))
    }
}

/// The first two of the schemas that some value may satisfy both; `None` if each value satisfies at
/// most one.
///
/// Two schemas are known to be disjoint if their types differ, if they list values and have no value in
/// common, or if they require a property of which this is true.
pub(super) fn overlapping(root: &Value, schemas: &[Value]) -> Option<(usize, usize)> {
    let facts: Vec<CommonFacts<'_>> =
        schemas.iter().map(|schema| CommonFacts::of(root, schema, &mut { MAX_READ })).collect();
    facts.iter().enumerate().find_map(|(first, one)| {
        let second = facts.iter().skip(first + 1).position(|other| !one.is_disjoint(other))?;
        Some((first, first + 1 + second))
    })
}

/// The bit of a type by its name; those of all types for a name that is not known.
fn bit(name: &Value) -> u8 {
    let name = name.as_str().map(|name| if name == "integer" { "number" } else { name });
    let place = TYPES.iter().position(|known| name == Some(*known));
    place.map_or(ALL, |place| 1 << place)
}

fn type_bit(value: &Value) -> u8 {
    let place = match value {
        Value::Null => 0,
        Value::Bool(_) => 1,
        Value::Number(_) => 2,
        Value::String(_) => 3,
        Value::Array(_) => 4,
        Value::Object(_) => 5,
    };
    1 << place
}

/// Whether two lists share a value, or are too long to find out.
fn share_a_value(a: &[Value], b: &[Value]) -> bool {
    a.len() * b.len() > MAX_PAIRS || a.iter().any(|a| b.iter().any(|b| equal(a, b)))
}

/// Equality of JSON Schema, for which 1 and 1.0 are equal.
fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| equal(a, b)))
        }
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_are_disjoint_by_type_value_or_required_property() {
        let root = json!({"$defs": {
            "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
            "dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "puppy"]}},
                    "required": ["kind"]},
            "loop": {"$ref": "#/$defs/loop"},
        }});
        let cat = json!({"$ref": "#/$defs/cat"});
        let disjoint = [
            json!([{"type": "string"}, {"type": ["integer", "null"]}]),
            json!([{"const": 1}, {"const": 2}, {"const": "1"}]),
            json!([{"type": "string"}, {"enum": [1, null]}]),
            json!([cat, {"$ref": "#/$defs/dog"}]),
            json!([cat, {"type": "null"}, false]),
            json!([{"allOf": [cat, {"minProperties": 1}]}, {"$ref": "#/$defs/dog"}]),
        ];
        for case in &disjoint {
            assert_eq!(overlapping(&root, case.as_array().unwrap()), None, "{case}");
        }
        for (case, pair) in [
            (json!([{"type": "integer"}, {"type": "number"}]), (0, 1)),
            (json!([{"const": 1}, {"type": "string"}, {"const": 1.0}]), (0, 2)),
            (json!([{"type": "string"}, {"type": "string", "minLength": 3}]), (0, 1)),
            (json!([cat, {"type": "object"}]), (0, 1)),
            (json!([{"type": "null"}, {"properties": {}}]), (0, 1)),
            (json!([{"$ref": "#/$defs/loop"}, {"type": "null"}]), (0, 1)),
        ] {
            assert_eq!(overlapping(&root, case.as_array().unwrap()), Some(pair), "{case}");
        }
    }
}
