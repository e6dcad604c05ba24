//! Finds out whether no value satisfies two schemas at once.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::pointer::resolve;

/// Schemas that are read to find the facts of one.
const MAX_READ: usize = 500;
/// Pairs of listed values that are compared to find one that two schemas share.
const MAX_PAIRS: usize = 1000;

/// The JSON types as bits. `integer` and `number` overlap, so they have one bit.
const TYPES: [(&str, u8); 7] = [
    ("null", 1),
    ("boolean", 2),
    ("integer", 4),
    ("number", 4),
    ("string", 8),
    ("array", 16),
    ("object", OBJECT),
];
const OBJECT: u8 = 32;
const ALL: u8 = 63;

/// What every value of a schema has in common.
#[derive(Clone)]
struct CommonFacts {
    /// The possible types.
    types: u8,
    /// The possible values, if the schema lists them.
    literals: Option<Vec<Value>>,
    /// The possible values of required properties that list them.
    properties: BTreeMap<String, Vec<Value>>,
}

impl CommonFacts {
    /// The facts that hold for any value.
    fn none() -> Self {
        Self { types: ALL, literals: None, properties: BTreeMap::new() }
    }

    /// The facts of a schema. `left` is the number of schemas that may be read; of more, nothing is known.
    fn of(root: &Value, schema: &Value, left: &mut usize) -> Self {
        if *left == 0 {
            return Self::none();
        }
        *left -= 1;
        let map = match schema {
            Value::Object(map) => map,
            Value::Bool(false) => return Self { types: 0, ..Self::none() },
            _ => return Self::none(),
        };
        let mut facts = Self::none();
        if let Some(types) = map.get("type") {
            facts.types &= bits(types);
        }
        if let Some(value) = map.get("const") {
            facts.restrict(std::slice::from_ref(value));
        }
        if let Some(Value::Array(values)) = map.get("enum") {
            facts.restrict(values);
        }
        if let Some(Value::String(reference)) = map.get("$ref")
            && let Some((_, target)) = resolve(root, reference)
        {
            facts.merge(Self::of(root, target, left));
        }
        if let Some(Value::Array(all)) = map.get("allOf") {
            all.iter().for_each(|part| facts.merge(Self::of(root, part, left)));
        }
        facts.add_properties(root, map, left);
        facts
    }

    fn add_properties(&mut self, root: &Value, map: &Map<String, Value>, left: &mut usize) {
        let (Some(Value::Object(properties)), Some(Value::Array(required))) =
            (map.get("properties"), map.get("required"))
        else {
            return;
        };
        for name in required.iter().filter_map(Value::as_str) {
            let facts = properties.get(name).map(|schema| Self::of(root, schema, left));
            if let Some(literals) = facts.and_then(|facts| facts.literals) {
                self.properties.insert(name.to_owned(), literals);
            }
        }
    }

    fn restrict(&mut self, values: &[Value]) {
        self.types &= values.iter().map(type_bit).fold(0, |all, bit| all | bit);
        self.literals = Some(values.to_vec());
    }

    /// Adds what else is known of the same values.
    fn merge(&mut self, other: Self) {
        self.types &= other.types;
        if self.literals.is_none() {
            self.literals = other.literals;
        }
        for (name, values) in other.properties {
            self.properties.entry(name).or_insert(values);
        }
    }

    fn is_disjoint(&self, other: &Self) -> bool {
        let common = self.types & other.types;
        if common == 0 {
            return true;
        }
        if let (Some(own), Some(others)) = (&self.literals, &other.literals)
            && !share_a_value(own, others)
        {
            return true;
        }
        common == OBJECT
            && self.properties.iter().any(|(name, own)| {
                other.properties.get(name).is_some_and(|others| !share_a_value(own, others))
            })
    }
}

/// The first two of the schemas that some value may satisfy both; `None` if each value satisfies at
/// most one.
///
/// Two schemas are known to be disjoint if their types differ, if they list values and have no value in
/// common, or if they require a property of which this is true.
pub(super) fn overlapping(root: &Value, schemas: &[Value]) -> Option<(usize, usize)> {
    let facts: Vec<CommonFacts> =
        schemas.iter().map(|schema| CommonFacts::of(root, schema, &mut { MAX_READ })).collect();
    facts.iter().enumerate().find_map(|(first, one)| {
        let second = facts.iter().skip(first + 1).position(|other| !one.is_disjoint(other))?;
        Some((first, first + 1 + second))
    })
}

fn bits(types: &Value) -> u8 {
    let bit = |name: &str| TYPES.iter().find(|(known, _)| *known == name).map_or(ALL, |t| t.1);
    match types {
        Value::String(name) => bit(name),
        Value::Array(names) => {
            names.iter().filter_map(Value::as_str).map(bit).fold(0, |all, bit| all | bit)
        }
        _ => ALL,
    }
}

fn type_bit(value: &Value) -> u8 {
    bits(&Value::from(match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }))
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
