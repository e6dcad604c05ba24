use super::*;

/// The prepared schema without the library's options.
fn rewritten(schema: &Value) -> Value {
    let mut prepared = prepared(schema).unwrap();
    assert!(prepared.as_object_mut().unwrap().remove("x-guidance").is_some());
    prepared
}

fn refusal(schema: &Value) -> String {
    prepared(schema).unwrap_err().to_string()
}

#[test]
fn keywords_that_cannot_be_enforced_are_named_with_their_place() {
    for keyword in [
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
    ] {
        let schema = json!({"properties": {"a/b": {"items": {keyword: {}}}}});
        let expected = format!("#/properties/a~1b/items/{keyword}: {keyword} is not supported");
        assert_eq!(refusal(&schema), expected);
    }
    for (schema, expected) in [
        (json!({"requird": ["a"]}), "#/requird: requird is not a known keyword"),
        (json!({"uniqueItems": true}), "#/uniqueItems: uniqueItems is not supported"),
        (json!({"nullable": true}), "#/nullable: nullable is not supported"),
        (json!({"anyOf": [{}, {"$id": "x"}]}), "#/anyOf/1/$id: $id is not supported"),
        (json!({"anyOf": []}), "#/anyOf: a list of at least one schema was expected"),
        (json!({"properties": []}), "#/properties: an object of schemas was expected"),
        (json!({"items": 5}), "#/items: a schema is an object or a boolean"),
        (json!({"format": "color"}), "#/format: format is \"color\": it must be one of date,"),
        (json!({"type": "float"}), "#/type: type is \"float\": it must be one or several of"),
        (json!({"enum": []}), "#/enum: enum must be a list of 1 to 2000 values"),
        (json!({"const": 1e300}), "#/const: 1e+300 must be a number"),
        (json!({"minimum": true}), "#/minimum: true must be a number"),
        (json!({"minLength": -1}), "#/minLength: -1 must be a whole number from 0 to 100000"),
        (json!({"multipleOf": 0.01}), "#/multipleOf: multipleOf is 0.01: it must be a whole"),
        (json!({"pattern": "(?=a)"}), "#/pattern: the pattern \"(?=a)\" is not supported"),
        (json!({"pattern": "(?P<stop>a)"}), "#/pattern: a group of a pattern must not be named"),
        (json!({"$ref": "other.json"}), "#/$ref: $ref is \"other.json\": it must name a place"),
        (json!({"$ref": "#/$defs/x"}), "#/$ref: $ref is \"#/$defs/x\": it must name a place"),
        (json!({"additionalItems": {}}), "#/additionalItems: additionalItems needs a list in"),
        (json!({"$schema": "http://x"}), "#/$schema: $schema is \"http://x\": it is not a known"),
        (json!(false), "#: the schema accepts no value"),
        (json!({"minProperties": 2}), "#/minProperties: minProperties may require at most one"),
        (
            json!({"properties": {"a": {}}, "maxProperties": 1}),
            "#/maxProperties: minProperties and maxProperties are supported if",
        ),
        (
            json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
            "#/oneOf: oneOf is supported if its schemas differ",
        ),
        (
            json!({"allOf": [{"multipleOf": 999_983}, {"multipleOf": 999_979}]}),
            "#/allOf/1/multipleOf: the least common multiple of every multipleOf is too large",
        ),
    ] {
        let message = refusal(&schema);
        assert!(message.starts_with(expected), "{message}");
    }
    // A definition is checked where it stands, and only if something refers to it.
    let unused = json!({"$defs": {"a": {"not": {}}}, "type": "null"});
    assert_eq!(rewritten(&unused), json!({"type": "null"}));
    let used = json!({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"});
    assert_eq!(refusal(&used), "#/$defs/a/not: not is not supported");
}

#[test]
fn size_and_depth_are_bounded() {
    let mut deep = json!({});
    for _ in 0..40 {
        deep = json!({"items": {"anyOf": [deep]}});
    }
    assert!(refusal(&deep).contains("more than 64 schemas contain each other"));
    let wide: Vec<Value> = (0..5000).map(|_| json!({})).collect();
    assert!(refusal(&json!({"anyOf": wide})).contains("more than 4096 schemas"));
    let long = format!("{{\"title\": \"{}\"}}", "a".repeat(MAX_BYTES));
    assert!(matches!(prepared_text(&long), Err(GrammarError::Refused(_))));
    assert!(matches!(prepared_text("{"), Err(GrammarError::Refused(_))));
    // A chain of references that never ends does not grow.
    let chain = json!({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}},
        "oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]});
    assert!(refusal(&chain).starts_with("#/oneOf: "));
}

#[test]
fn annotations_are_dropped_and_references_become_definitions() {
    let schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.com/x",
        "title": "T", "x-order": 3, "uniqueItems": false, "type": "object",
        "properties": {
            "id": {"type": "string", "default": "a"},
            "next": {"anyOf": [{"$ref": "#"}, {"$ref": "#/definitions/a~1b"}]},
            "again": {"$ref": "#/definitions/a%7E1b"},
        },
        "definitions": {"a/b": {"const": 1, "description": "one"}},
    });
    assert_eq!(
        rewritten(&schema),
        json!({
            "type": "object",
            "properties": {
                "id": {"type": "string"},
                "next": {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/d0"}]},
                "again": {"$ref": "#/$defs/d0"},
            },
            "$defs": {"d0": {"const": 1}},
        })
    );
    let order: Vec<String> =
        rewritten(&schema)["properties"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(order, ["id", "next", "again"], "the order of properties is that of the schema");
}

#[test]
fn keywords_are_rewritten_to_what_the_library_enforces() {
    let halves = json!([{"type": "number", "minimum": 0}, {"type": "number", "maximum": 0}]);
    for (schema, expected) in [
        (json!(true), json!({})),
        (json!({"type": "number", "title": "n"}), json!({"anyOf": halves})),
        (
            json!({"type": ["number", "string"], "maxLength": 3}),
            json!({"anyOf": [
                halves[0], halves[1], {"type": ["string"], "maxLength": 3},
            ]}),
        ),
        (json!({"type": "number", "minimum": -1.5}), json!({"type": "number", "minimum": -1.5})),
        (
            json!({"oneOf": [{"type": "null"}, {"type": "integer"}], "anyOf": [{}]}),
            json!({"anyOf": [{}], "allOf": [{"anyOf": [{"type": "null"}, {"type": "integer"}]}]}),
        ),
        (
            json!({"items": [{"type": "null"}], "additionalItems": false}),
            json!({"prefixItems": [{"type": "null"}], "items": false}),
        ),
        (json!({"pattern": "^a.[.]\\.$"}), json!({"pattern": "^a[^\\n\\r\\u2028\\u2029][.]\\.$"})),
        (json!({"format": "uuid"}), json!({"format": "uuid"})),
        (
            json!({"properties": {"a": {}}, "required": ["a"], "minProperties": 2,
                   "additionalProperties": {"type": "null"}}),
            json!({"properties": {"a": {}}, "required": ["a"], "minProperties": 2,
                   "additionalProperties": {"type": "null"}}),
        ),
    ] {
        assert_eq!(rewritten(&schema), expected, "{schema}");
    }
    let dated = rewritten(&json!({"type": "string", "format": "date"}));
    assert!(dated["allOf"][0]["pattern"].as_str().unwrap().contains("02-29"), "{dated}");
}
