//! Unifies and checks the values of `config.json` that all families share.

use serde_json::Value;

use super::values::{Config, get, refuse_value};
use crate::error::EngineError;

/// Rewrites rotary parameters into the form of transformers 4: `rope_theta` and
/// `partial_rotary_factor` at the top level, and a `rope_scaling` with a `rope_type` only if
/// positions are scaled. Transformers 5 writes all of them into `rope_parameters`.
pub(super) fn unify_rope(config: &mut Config) -> Result<(), EngineError> {
    let mut scaling = None;
    for key in ["rope_scaling", "rope_parameters"] {
        let mut rope = match config.remove(key) {
            None | Some(Value::Null) => continue,
            Some(Value::Object(rope)) => rope,
            Some(value) => return Err(refuse_value(key, &value, "an object was expected")),
        };
        if rope.values().any(Value::is_object) {
            let expected = "only one set of rotary parameters for all layers can be served";
            return Err(refuse_value(key, &Value::Object(rope), expected));
        }
        for name in ["rope_theta", "partial_rotary_factor"] {
            if let Some(value) = rope.remove(name) {
                config.insert(name.to_owned(), value);
            }
        }
        let (old, new) = (rope.remove("type"), rope.remove("rope_type"));
        if let Some(kind) = new.or(old)
            && kind != "default"
            && scaling.is_none()
        {
            rope.insert("rope_type".to_owned(), kind);
            scaling = Some(Value::Object(rope));
        }
    }
    if let Some(scaling) = scaling {
        config.insert("rope_scaling".to_owned(), scaling);
    }
    Ok(())
}

/// Checks types and ranges, after defaults are filled in.
pub(super) fn check(config: &Config) -> Result<(), EngineError> {
    let refuse = |key: &str, expected: &str| refuse_value(key, get(config, key), expected);
    let positive = |key: &str| {
        let number = get(config, key).as_u64().filter(|n| (1..=u64::from(u32::MAX)).contains(n));
        number.ok_or_else(|| refuse(key, "a positive whole number was expected"))
    };
    for key in ["vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"] {
        positive(key)?;
    }
    let (hidden, heads) = (positive("hidden_size")?, positive("num_attention_heads")?);
    let head_dim = get(config, "head_dim");
    if !head_dim.is_null() && !head_dim.as_u64().is_some_and(|n| n > 0 && n.is_multiple_of(2)) {
        return Err(refuse("head_dim", "an even whole number was expected"));
    }
    if head_dim.is_null() && hidden % (2 * heads) != 0 {
        let expected = format!("it must divide hidden_size {hidden} into even parts");
        return Err(refuse("num_attention_heads", &expected));
    }
    if heads % positive("num_key_value_heads")? != 0 {
        let expected = format!("it must divide num_attention_heads {heads}");
        return Err(refuse("num_key_value_heads", &expected));
    }
    for key in ["rope_theta", "rms_norm_eps"] {
        if !get(config, key).as_f64().is_some_and(|x| x.is_finite() && x > 0.0) {
            return Err(refuse(key, "a positive number was expected"));
        }
    }
    if !get(config, "tie_word_embeddings").is_boolean() {
        return Err(refuse("tie_word_embeddings", "true or false was expected"));
    }
    Ok(())
}
