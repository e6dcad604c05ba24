//! Renders a template of a model's author within bounds of instructions, time and memory.
//!
//! Minijinja's fuel counts instructions, but one instruction may double a text, repeat it or walk a list of any
//! size. So every instruction that builds a value becomes a call of a filter of this module, which takes the
//! value's size from the budget of the rendering, before the value exists where one call can make it large.

use std::collections::{BTreeSet, HashSet};
use std::fmt::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use minijinja::machinery::{
    Instruction, Instructions, Vm, get_compiled_template, make_string_output,
};
use minijinja::value::{Object, Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters};

use super::python::PyRepr;

/// The template's name in its environment.
const NAME: &str = "chat_template";
/// The name of the budget among a rendering's values.
const BUDGET: &str = "hone_budget";
/// Most instructions of a rendering. A thousand messages take about 100,000.
const MAX_INSTRUCTIONS: u64 = 5_000_000;
/// Most bytes that the values of a rendering have, together. A megabyte of messages takes about ten.
const MAX_BYTES: u64 = 256 << 20;
/// Most values that a rendering visits inside of lists and maps. Each takes some ten nanoseconds.
const MAX_VISITS: u64 = 10_000_000;
/// Most levels of lists and maps within each other, since values are visited and freed by recursion.
const MAX_DEPTH: usize = 200;
/// The size of a list's item, in bytes.
const ITEM: u64 = 32;

/// What is left to a rendering.
#[derive(Debug)]
struct Budget {
    bytes: AtomicU64,
    visits: AtomicU64,
}

impl Object for Budget {}

impl Budget {
    fn of(state: &State) -> Arc<Self> {
        state.get_or_set_temp_object(BUDGET, || Self {
            bytes: AtomicU64::new(MAX_BYTES),
            visits: AtomicU64::new(MAX_VISITS),
        })
    }

    fn take(left: &AtomicU64, amount: u64) -> Result<(), Error> {
        let less = |left: u64| left.checked_sub(amount);
        match left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
            Ok(_) => Ok(()),
            Err(_) => {
                left.store(0, Ordering::Relaxed);
                Err(refusal("it builds more than a chat template may"))
            }
        }
    }

    fn take_bytes(&self, bytes: u64) -> Result<(), Error> {
        Self::take(&self.bytes, bytes)
    }

    /// The bytes of the texts in a value.
    fn visit(&self, value: &Value, depth: usize) -> Result<u64, Error> {
        Self::take(&self.visits, 1)?;
        // A namespace is the one value that can come to contain itself.
        let is_namespace = value.as_object().is_some_and(|o| o.type_name().ends_with("Namespace"));
        if is_namespace || depth > MAX_DEPTH {
            return Err(refusal("its values are nested too deeply"));
        }
        if let Some(text) = value.as_str() {
            return Ok(text.len() as u64);
        }
        let is_map = value.kind() == ValueKind::Map;
        if !is_map && !is_list(value) {
            return Ok(ITEM);
        }
        let mut bytes = ITEM;
        for item in value.try_iter()? {
            bytes = bytes.saturating_add(self.visit(&item, depth + 1)?);
            if is_map && let Ok(inner) = value.get_item(&item) {
                bytes = bytes.saturating_add(self.visit(&inner, depth + 1)?);
            }
        }
        Ok(bytes)
    }

    /// Takes the bytes of a new value: its text, or the places of its items, which it shares with others.
    fn take_value(&self, value: &Value) -> Result<(), Error> {
        self.visit(value, 0)?;
        self.take_bytes(match value.as_str() {
            Some(text) => text.len() as u64,
            None => value.len().unwrap_or(1) as u64 * ITEM,
        })
    }
}

/// Writes what the budget has bytes for.
pub(super) struct Bounded<'a, W> {
    to: &'a mut W,
    budget: Arc<Budget>,
}

impl<'a, W> Bounded<'a, W> {
    pub(super) fn new(state: &State, to: &'a mut W) -> Self {
        Self { to, budget: Budget::of(state) }
    }
}

impl<W: fmt::Write> fmt::Write for Bounded<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.budget.take_bytes(text.len() as u64).map_err(|_| fmt::Error)?;
        self.to.write_str(text)
    }
}

fn refusal(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// Prints a value as Python does.
fn print(state: &State, to: &mut impl fmt::Write, value: &Value) -> Result<(), Error> {
    let mut to = Bounded::new(state, to);
    let written = match value.kind() {
        ValueKind::None | ValueKind::Map | ValueKind::Seq => write!(to, "{}", PyRepr(value)),
        ValueKind::Bool => to.write_str(if value.is_true() { "True" } else { "False" }),
        _ => write!(to, "{value}"),
    };
    written.map_err(|_| refusal("it writes more than a chat template may"))
}

/// Bytes that an operator, a filter or a method may have beyond those of its arguments.
fn growth(name: &str, args: &[Value]) -> u64 {
    let text = |i: usize| args.get(i).and_then(Value::as_str).unwrap_or_default();
    let counts = args.iter().skip(1).filter_map(|arg| match arg.kind() {
        ValueKind::Map => arg.get_attr("width").ok().and_then(|width| width.as_usize()),
        _ => arg.as_usize(),
    });
    let count = counts.max().unwrap_or(0) as u64;
    let pieces = |pieces: usize| pieces as u64 * ITEM;
    match name {
        "replace" => {
            let found = match text(1) {
                "" => text(0).len() + 1,
                from => text(0).matches(from).count(),
            };
            found as u64 * text(2).len() as u64
        }
        "join" => {
            let items = args.iter().filter_map(Value::len).max().unwrap_or(0);
            let separator = args.iter().filter_map(Value::as_str).map(str::len).max().unwrap_or(0);
            items as u64 * separator as u64
        }
        "indent" => (text(0).lines().count() as u64).saturating_mul(count.max(4)),
        "batch" | "slice" => count.saturating_mul(ITEM),
        "split" if !text(1).is_empty() => pieces(text(0).matches(text(1)).count()),
        "split" | "lines" | "splitlines" => pieces(text(0).matches(char::is_whitespace).count()),
        "list" | "reverse" | "sort" | "unique" => pieces(text(0).len()),
        // A width or a precision of four digits, or from an argument, could be any number.
        "format" => {
            let wide =
                text(0).as_bytes().windows(4).any(|four| four.iter().all(u8::is_ascii_digit));
            if wide || text(0).contains(['*']) { u64::MAX } else { text(0).len() as u64 * 1000 }
        }
        _ => 0,
    }
}

/// Calls a filter or a method, whose arguments may have as many bytes as a rendering, and takes its
/// value.
fn call(
    state: &State,
    name: &str,
    args: &[Value],
    run: impl FnOnce() -> Result<Value, Error>,
) -> Result<Value, Error> {
    let budget = Budget::of(state);
    let mut bytes = growth(name, args);
    budget.take_bytes(bytes)?;
    for arg in args {
        bytes = bytes.saturating_add(budget.visit(arg, 0)?);
    }
    if bytes > budget.bytes.load(Ordering::Relaxed) {
        return Err(refusal("it builds more than a chat template may"));
    }
    let mut value = run()?;
    budget.take_value(&value)?;
    // Some values compute their items from another value each time: a row of them would be read by recursion.
    if is_list(&value) {
        value = value.try_iter()?.collect();
    } else if name == "chain" {
        value = value
            .try_iter()?
            .map(|key| (key.clone(), value.get_item(&key).unwrap_or_default()))
            .collect();
    }
    Ok(value)
}

/// `a + b` and `a * b` as the library computes them.
fn computed(state: &State, expression: &str, a: Value, b: Value) -> Result<Value, Error> {
    state.env().compile_expression(expression)?.eval(Value::from_iter([("a", a), ("b", b)]))
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn add(state: &State, a: Value, b: Value) -> Result<Value, Error> {
    let budget = Budget::of(state);
    if let (Some(a), Some(b)) = (a.as_i64(), b.as_i64()) {
        return Ok(Value::from(i128::from(a) + i128::from(b)));
    }
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        budget.take_bytes((a.len() + b.len()) as u64)?;
        return Ok(Value::from([a, b].concat()));
    }
    if is_list(&a) && is_list(&b) {
        let items = a.len().unwrap_or(0) + b.len().unwrap_or(0);
        budget.take_bytes(items as u64 * ITEM)?;
        return Ok(Value::from_iter(a.try_iter()?.chain(b.try_iter()?)));
    }
    computed(state, "a + b", a, b)
}

fn multiply(state: &State, a: Value, b: Value) -> Result<Value, Error> {
    let length = |value: &Value| match value.as_str() {
        Some(text) => text.len() as u64,
        None if is_list(value) => value.len().unwrap_or(0) as u64 * ITEM,
        None => 0,
    };
    let times = a.as_usize().or(b.as_usize()).unwrap_or(0) as u64;
    Budget::of(state).take_bytes((length(&a) + length(&b)).saturating_mul(times))?;
    computed(state, "a * b", a, b)
}

/// The text that is printed of values, one after the other: `~`, and the filter `string`.
fn string(state: &State, values: Rest<Value>) -> Result<Value, Error> {
    let mut text = String::new();
    values.iter().try_for_each(|value| print(state, &mut text, value))?;
    Ok(Value::from(text))
}

/// `a[start:stop:step]` as in Python. Minijinja's panics for an empty text and a negative step, and slices of
/// slices would be iterated by recursion.
fn slice(
    state: &State,
    a: Value,
    start: Option<i64>,
    stop: Option<i64>,
    step: Option<i64>,
) -> Result<Value, Error> {
    let items: Vec<Value> = match a.as_str() {
        Some(text) => text.chars().map(Value::from).collect(),
        None if a.is_none() || a.is_undefined() => Vec::new(),
        None if is_list(&a) => a.try_iter()?.collect(),
        None => return Err(refusal("only a text or a list can be sliced")),
    };
    Budget::of(state).take_bytes(items.len() as u64 * ITEM)?;
    let (count, step) = (i64::try_from(items.len()).unwrap_or(i64::MAX), step.unwrap_or(1));
    if step == 0 {
        return Err(refusal("the step of a slice must not be 0"));
    }
    let (least, most) = if step > 0 { (0, count) } else { (-1, count - 1) };
    let place = |index: i64| match index {
        ..0 => index.saturating_add(count).max(least),
        _ => index.min(most),
    };
    let (first, end) = if step > 0 { (least, most) } else { (most, least) };
    let (first, end) = (start.map_or(first, place), stop.map_or(end, place));
    let places = std::iter::successors(Some(first), |at| at.checked_add(step));
    let within = places.take_while(|at| if step > 0 { *at < end } else { *at > end });
    let taken = within.filter_map(|at| items.get(usize::try_from(at).ok()?));
    Ok(match a.as_str() {
        Some(_) => Value::from(taken.filter_map(Value::as_str).collect::<String>()),
        None => taken.cloned().collect(),
    })
}

fn list(state: &State, items: Rest<Value>) -> Result<Value, Error> {
    let list = Value::from(items.0);
    Budget::of(state).take_value(&list)?;
    Ok(list)
}

fn map(state: &State, pairs: Rest<Value>) -> Result<Value, Error> {
    let pairs = pairs.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone()));
    let map: Value = pairs.collect();
    Budget::of(state).take_value(&map)?;
    Ok(map)
}

/// What a namespace may hold.
fn held(state: &State, value: Value) -> Result<Value, Error> {
    Budget::of(state).visit(&value, 0)?;
    Ok(value)
}

/// A template whose renderings have a budget.
pub(super) struct BoundedTemplate {
    environment: Environment<'static>,
    /// The names of the filters that call a filter or a method of the template within the budget.
    bounded: BTreeSet<String>,
}

impl BoundedTemplate {
    pub(super) fn new(mut environment: Environment<'static>, text: String) -> Result<Self, Error> {
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_formatter(|out, state, value| print(state, out, value));
        for (name, run) in [
            // Under their names, since `map` calls filters, too.
            ("replace", Value::from_function(filters::replace)),
            ("join", Value::from_function(filters::join)),
            ("indent", Value::from_function(filters::indent)),
            ("format", Value::from_function(filters::format)),
            ("batch", Value::from_function(filters::batch)),
            ("slice", Value::from_function(filters::slice)),
        ] {
            environment.add_filter(name, move |state: &State, args: Rest<Value>| {
                call(state, name, &args, || run.call(state, &args))
            });
        }
        environment.add_filter("+", add);
        environment.add_filter("*", multiply);
        environment.add_filter("~", string);
        environment.add_filter("string", string);
        environment.add_filter("[:]", slice);
        environment.add_filter("[]", list);
        environment.add_filter("{}", map);
        environment.add_filter("held!", held);
        environment.add_template_owned(NAME, text)?;
        let mut bounded = BTreeSet::new();
        {
            let template = environment.get_template(NAME)?;
            let compiled = get_compiled_template(&template);
            for code in std::iter::once(&compiled.instructions).chain(compiled.blocks.values()) {
                for instruction in (0..).map_while(|i| code.get(i)) {
                    match instruction {
                        Instruction::ApplyFilter(name, ..) => {
                            bounded.insert(format!("filter:{name}"))
                        }
                        Instruction::CallMethod(name, _) => {
                            bounded.insert(format!("method:{name}"))
                        }
                        Instruction::Include(_) | Instruction::LoadBlocks => {
                            return Err(refusal("a chat template cannot include another"));
                        }
                        _ => false,
                    };
                }
            }
        }
        for name in &bounded {
            let (kind, inner) = name.split_once(':').unwrap_or_default();
            let (is_filter, inner) = (kind == "filter", inner.to_owned());
            environment.add_filter(name.clone(), move |state: &State, args: Rest<Value>| {
                call(state, &inner, &args, || match is_filter {
                    true => state.apply_filter(&inner, &args),
                    false => args[0].call_method(state, &inner, &args[1..]),
                })
            });
        }
        Ok(Self { environment, bounded })
    }

    /// The variables that the template reads and does not set.
    pub(super) fn variables(&self) -> HashSet<String> {
        let template = self.environment.get_template(NAME);
        template.map_or_else(|_| HashSet::new(), |template| template.undeclared_variables(false))
    }

    pub(super) fn render(&self, variables: Value) -> Result<String, Error> {
        let template = self.environment.get_template(NAME)?;
        let compiled = get_compiled_template(&template);
        let code = self.rewritten(&compiled.instructions);
        let blocks =
            compiled.blocks.iter().map(|(name, code)| (*name, self.rewritten(code))).collect();
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        let vm = Vm::new(&self.environment);
        // A panic of the library must not end more than this rendering.
        let run = || vm.eval(&code, variables, &blocks, &mut output, AutoEscape::None).map(drop);
        let done = catch_unwind(AssertUnwindSafe(run));
        done.unwrap_or_else(|_| Err(refusal("the template's interpreter failed")))?;
        Ok(text)
    }

    /// The instructions, with those that build a value replaced by filters.
    ///
    /// What takes more than one instruction stands at the end, so that no target of a jump changes.
    fn rewritten<'a>(&'a self, code: &Instructions<'a>) -> Instructions<'a> {
        const UNCACHED: u8 = u8::MAX;
        let filter = |name, args| Instruction::ApplyFilter(name, args, UNCACHED);
        let known = |kind: &str, name: &str| {
            self.bounded.get(&format!("{kind}:{name}")).map_or("", String::as_str)
        };
        let mut bounded = Instructions::new(code.name(), code.source());
        let mut ends = Vec::new();
        let length = code.len() as u32;
        for (i, instruction) in (0..).map_while(|i| code.get(i).map(|found| (i, found))) {
            let at = length + 1 + ends.len() as u32;
            let replaced = match instruction {
                Instruction::Add => filter("+", Some(2)),
                Instruction::Mul => filter("*", Some(2)),
                Instruction::StringConcat => filter("~", Some(2)),
                Instruction::Slice => filter("[:]", Some(4)),
                Instruction::BuildList(Some(n)) if u16::try_from(*n).is_ok() => {
                    filter("[]", Some(*n as u16))
                }
                Instruction::BuildMap(n) if u16::try_from(n * 2).is_ok() => {
                    filter("{}", Some(*n as u16 * 2))
                }
                Instruction::ApplyFilter(name, args, _) => filter(known("filter", name), *args),
                Instruction::CallMethod(name, args) => filter(known("method", name), *args),
                Instruction::EmitRaw(text) => {
                    let text = Instruction::LoadConst(Value::from(*text));
                    ends.extend([text, Instruction::Emit, Instruction::Jump(i + 1)]);
                    Instruction::Jump(at)
                }
                Instruction::SetAttr(_) => {
                    let held = filter("held!", Some(1));
                    ends.extend([Instruction::Swap, held, Instruction::Swap]);
                    ends.extend([instruction.clone(), Instruction::Jump(i + 1)]);
                    Instruction::Jump(at)
                }
                other => other.clone(),
            };
            match code.get_line(i).and_then(|line| u16::try_from(line).ok()) {
                Some(line) => bounded.add_with_line(replaced, line),
                None => bounded.add(replaced),
            };
        }
        bounded.add(Instruction::Return);
        for instruction in ends {
            bounded.add(instruction);
        }
        bounded
    }
}
