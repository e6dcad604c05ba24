//! References within a schema, and names of places in it.

use percent_encoding::percent_decode_str;
use serde_json::Value;

/// The JSON pointer that a reference within the document names, and the value there; `None` for a
/// reference to another document, to an anchor or to a place that does not exist.
pub(super) fn resolve<'a>(root: &'a Value, reference: &str) -> Option<(String, &'a Value)> {
    let pointer = percent_decode_str(reference.strip_prefix('#')?).decode_utf8().ok()?;
    let value = root.pointer(&pointer)?;
    Some((pointer.into_owned(), value))
}

/// The path of a member of the value at `path`.
pub(super) fn member(path: &str, name: &str) -> String {
    format!("{path}/{}", name.replace('~', "~0").replace('/', "~1"))
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
