//! References within a schema, and names of places in it.

use serde_json::Value;

/// The JSON pointer that a reference within the document names, and the value there; `None` for a
/// reference to another document, to an anchor or to a place that does not exist.
pub(super) fn resolve<'a>(root: &'a Value, reference: &str) -> Option<(String, &'a Value)> {
    let pointer = percent_decoded(reference.strip_prefix('#')?)?;
    let value = root.pointer(&pointer)?;
    Some((pointer, value))
}

/// The path of a member of the value at `path`.
pub(super) fn member(path: &str, name: &str) -> String {
    format!("{path}/{}", name.replace('~', "~0").replace('/', "~1"))
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        if *first == b'%' {
            let digits = std::str::from_utf8(tail.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = tail.get(2..)?;
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn references_are_decoded() {
        let root = json!({"$defs": {"a/b": 1, "c d": [true, {"~": 2}]}});
        let found = |reference: &str| resolve(&root, reference).map(|(_, value)| value.clone());
        assert_eq!(found("#"), Some(root.clone()));
        assert_eq!(found("#/$defs/a~1b"), Some(json!(1)));
        assert_eq!(found("#/%24defs/c%20d/1/~0"), Some(json!(2)));
        for wrong in ["", "#/$defs/x", "#name", "other.json#/a", "#/%2", "#/%zz", "#/%ff"] {
            assert_eq!(found(wrong), None, "{wrong}");
        }
        assert_eq!(member("#/a", "b/~"), "#/a/b~1~0");
    }
}
