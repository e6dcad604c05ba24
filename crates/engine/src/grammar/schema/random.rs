//! Random schemas of supported keywords, for tests and measurements.

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

/// Schemas that contain each other in a random schema.
const MAX_DEPTH: usize = 3;

/// A random schema of supported keywords. Its values are short: strings and arrays have a bound, objects
/// have no additional properties, and schemas contain each other three times at most.
pub fn random_schema(seed: u64) -> Value {
    let mut random =
        RandomSchema { random: ChaCha8Rng::seed_from_u64(seed), definitions: Map::new() };
    let mut schema = random.object(0);
    if !random.definitions.is_empty()
        && let Value::Object(map) = &mut schema
    {
        map.insert("$defs".to_owned(), Value::Object(random.definitions));
    }
    schema
}

struct RandomSchema {
    random: ChaCha8Rng,
    definitions: Map<String, Value>,
}

impl RandomSchema {
    fn chance(&mut self, one_in: u32) -> bool {
        self.random.random_ratio(1, one_in)
    }

    fn schema(&mut self, depth: usize) -> Value {
        let kinds = if depth < MAX_DEPTH { 16 } else { 10 };
        match self.random.random_range(0..kinds) {
            0 => json!({"type": "null", "description": "nothing"}),
            1 => json!({"type": "boolean"}),
            2 | 3 => self.integer(),
            4 => self.number(),
            5 | 6 => self.string(),
            7 => self.text_of_a_kind(),
            8 => json!({"enum": ["red", "green", 7, null, 2.5, true, ["a", 1], {"k": "v"}]}),
            9 => {
                let constants = [json!("only"), json!(1), json!({"x": null})];
                json!({"const": constants.choose(&mut self.random)})
            }
            10 | 11 => self.object(depth + 1),
            12 => self.array(depth + 1),
            13 => self.tuple(depth + 1),
            14 => self.union(depth + 1),
            _ => self.reference(depth + 1),
        }
    }

    fn integer(&mut self) -> Value {
        let low = self.random.random_range(-200..200_i64);
        let high = low + self.random.random_range(0..1000_i64);
        match self.random.random_range(0..5) {
            0 => json!({"type": "integer"}),
            1 => json!({"type": "integer", "minimum": low}),
            2 => json!({"type": "integer", "minimum": low, "exclusiveMaximum": high + 1}),
            3 => json!({"type": "integer", "minimum": 0, "maximum": 300, "multipleOf": 7}),
            _ => json!({"allOf": [{"type": "integer", "minimum": low}, {"maximum": high}]}),
        }
    }

    fn number(&mut self) -> Value {
        let low = f64::from(self.random.random_range(-400..400)) / 8.0;
        match self.random.random_range(0..4) {
            0 => json!({"type": "number"}),
            1 => json!({"type": ["number", "null"]}),
            2 => json!({"type": "number", "maximum": low}),
            _ => json!({"type": "number", "exclusiveMinimum": low, "maximum": low + 12.5}),
        }
    }

    fn string(&mut self) -> Value {
        let short = self.random.random_range(0..4);
        json!({"type": "string", "minLength": short, "maxLength": short + 6})
    }

    fn text_of_a_kind(&mut self) -> Value {
        let patterns = ["^[A-Z][a-z]{1,5}$", "^(yes|no|maybe)$", "^\\d{3}-\\d{2}$", "^a.b$"];
        let formats = ["date", "time", "date-time", "uuid", "ipv4", "ipv6"];
        if self.chance(2) {
            json!({"type": "string", "pattern": patterns.choose(&mut self.random)})
        } else {
            json!({"type": "string", "format": formats.choose(&mut self.random)})
        }
    }

    fn object(&mut self, depth: usize) -> Value {
        if depth > 0 && self.chance(6) {
            let schema = self.schema(MAX_DEPTH);
            return json!({
                "type": "object", "patternProperties": {"^k[0-9]$": schema},
                "additionalProperties": false, "minProperties": 1, "maxProperties": 2,
            });
        }
        let (mut properties, mut required) = (Map::new(), Vec::new());
        for name in ["name", "a b", "größe", "x\"y"].iter().take(self.random.random_range(1..=4))
        {
            properties.insert((*name).to_owned(), self.schema(depth));
            if !self.chance(3) {
                required.push(*name);
            }
        }
        json!({
            "type": "object", "properties": properties, "required": required,
            "additionalProperties": false,
        })
    }

    fn array(&mut self, depth: usize) -> Value {
        let least = self.random.random_range(0..2);
        let most = least + self.random.random_range(0..2);
        json!({"type": "array", "items": self.schema(depth), "minItems": least, "maxItems": most})
    }

    fn tuple(&mut self, depth: usize) -> Value {
        let items = [self.schema(depth), self.schema(MAX_DEPTH)];
        json!({"type": "array", "prefixItems": items, "items": false, "minItems": 2})
    }

    fn union(&mut self, depth: usize) -> Value {
        match self.random.random_range(0..3) {
            0 => json!({"anyOf": [self.schema(depth), {"type": "null"}]}),
            1 => json!({"oneOf": [self.integer(), self.string(), self.array(depth)]}),
            _ => {
                let option = |kind: &str, value: Value| {
                    json!({
                        "type": "object", "required": ["kind", "value"],
                        "properties": {"kind": {"const": kind}, "value": value},
                        "additionalProperties": false,
                    })
                };
                json!({"oneOf": [option("a", self.integer()), option("b", self.string())]})
            }
        }
    }

    fn reference(&mut self, depth: usize) -> Value {
        let schema = self.schema(depth);
        let name = format!("part {}", self.definitions.len());
        let reference = format!("#/$defs/part%20{}", self.definitions.len());
        self.definitions.insert(name, schema);
        json!({ "$ref": reference })
    }
}
