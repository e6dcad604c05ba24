//! A Rhai engine that can do nothing but compute, and not for long.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Instant;

use regex::{Regex, RegexBuilder};
use rhai::packages::{Package, StandardPackage};
use rhai::{Dynamic, Engine, EvalAltResult, FLOAT, INT, Position};

use crate::math::parse_number;

/// Patterns that are kept compiled; a script that makes up more is in error.
const PATTERNS: usize = 64;
/// Size of a compiled pattern in bytes.
const PATTERN_BYTES: usize = 1 << 18;
/// Bytes of text that the helpers may look at in one evaluation: their work is not counted as
/// operations.
const SCANNED: u64 = 64 << 20;
/// Operations between two looks at the clock.
const LOOK: u64 = 512;

thread_local! {
    static DEADLINE: Cell<Option<Instant>> = const { Cell::new(None) };
    static LEFT: Cell<u64> = const { Cell::new(SCANNED) };
}

type Answer<T> = Result<T, Box<EvalAltResult>>;

/// An engine without modules, `eval`, printing or sleeping, with bounds on operations, recursion
/// and the size of every value.
pub(crate) fn restricted(operations: u64) -> Engine {
    let mut engine = Engine::new_raw();
    engine.register_global_module(StandardPackage::new().as_shared_module());
    engine.disable_symbol("eval");
    engine
        .set_max_operations(operations)
        .set_max_call_levels(32)
        .set_max_expr_depths(64, 32)
        .set_max_string_size(256 * 1024)
        .set_max_array_size(10_000)
        .set_max_map_size(10_000)
        .set_max_variables(1_000)
        .set_max_functions(200);
    engine.on_print(|_| {}).on_debug(|_, _, _| {});
    engine.on_progress(|operations| {
        let late = operations % LOOK == 0 && DEADLINE.get().is_some_and(|d| Instant::now() >= d);
        late.then(|| Dynamic::from("out of time"))
    });
    // The standard package can put the thread to sleep.
    engine.register_fn("sleep", |_: INT| {});
    engine.register_fn("sleep", |_: FLOAT| {});
    engine
}

/// Adds the helpers that reward scripts have.
pub(super) fn add_helpers(engine: &mut Engine) {
    engine.register_fn("contains", |text: &str, part: &str| scan(text).map(|t| t.contains(part)));
    engine.register_fn("count", |text: &str, part: &str| -> Answer<INT> {
        if part.is_empty() {
            return Ok(0);
        }
        Ok(INT::try_from(scan(text)?.matches(part).count()).unwrap_or(INT::MAX))
    });
    engine.register_fn("extract_tag", |text: &str, tag: &str| -> Answer<Dynamic> {
        Ok(between(scan(text)?, tag).map_or(Dynamic::UNIT, |inner| inner.to_owned().into()))
    });
    engine.register_fn("to_number", |text: &str| -> Answer<Dynamic> {
        Ok(parse_number(scan(text)?).map_or(Dynamic::UNIT, Dynamic::from_float))
    });
    // A missing answer has no number.
    engine.register_fn("to_number", |(): ()| Dynamic::UNIT);
    let compiled: Mutex<HashMap<String, Regex>> = Mutex::default();
    engine.register_fn("matches", move |text: &str, pattern: &str| -> Answer<bool> {
        let mut compiled = compiled.lock().map_err(|_| "matches: a pattern panicked")?;
        if let Some(regex) = compiled.get(pattern) {
            return Ok(regex.is_match(scan(text)?));
        }
        if compiled.len() >= PATTERNS {
            return Err(format!("matches: more than {PATTERNS} different patterns").into());
        }
        let mut builder = RegexBuilder::new(pattern);
        let regex = builder.size_limit(PATTERN_BYTES).dfa_size_limit(PATTERN_BYTES).build();
        let regex = regex.map_err(|error| {
            let text = error.to_string();
            format!("matches: `{pattern}`: {}", text.lines().last().unwrap_or_default())
        })?;
        let found = regex.is_match(scan(text)?);
        compiled.insert(pattern.to_owned(), regex);
        Ok(found)
    });
}

/// Pays for looking at a text.
fn scan(text: &str) -> Answer<&str> {
    let left = LEFT.get().checked_sub(text.len() as u64);
    LEFT.set(left.unwrap_or(0));
    match left {
        Some(_) => Ok(text),
        None => Err(EvalAltResult::ErrorTooManyOperations(Position::NONE).into()),
    }
}

/// What stands between the last `<tag>` that is closed and its `</tag>`, trimmed.
fn between<'t>(text: &'t str, tag: &str) -> Option<&'t str> {
    let (before, _) = text.rsplit_once(&format!("</{tag}>"))?;
    let (_, inner) = before.rsplit_once(&format!("<{tag}>"))?;
    Some(inner.trim())
}

/// Evaluates with fresh budgets; `f` ends soon after `deadline`.
pub(crate) fn until<T>(deadline: Instant, f: impl FnOnce() -> T) -> T {
    DEADLINE.set(Some(deadline));
    let answer = fresh(f);
    DEADLINE.set(None);
    answer
}

/// Evaluates with a fresh budget of text to look at.
pub(super) fn fresh<T>(f: impl FnOnce() -> T) -> T {
    LEFT.set(SCANNED);
    f()
}
