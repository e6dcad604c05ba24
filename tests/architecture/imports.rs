//! Which file of a crate uses which other file of it, read from the syntax.
//!
//! File A uses file B if A names an item that B defines. A re-export (`pub use`) is followed to the
//! definition and does not count as a use, and neither does a `mod` declaration. Test modules are
//! left out.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::Visit;
use syn::{Attribute, Item, ItemUse, UseTree, Visibility, visit};

/// Path of a module below the crate root; the root is empty.
type Module = Vec<String>;

/// One module of a crate.
#[derive(Default)]
struct Contents {
    file: PathBuf,
    /// Names of the items that the module defines.
    defined: BTreeSet<String>,
    /// Those that are structs, enums or traits.
    types: BTreeSet<String>,
    /// Name in this module, and the path that a `use` gave it.
    imported: HashMap<String, Vec<String>>,
    /// Modules whose items are all re-exported or imported.
    globs: Vec<Vec<String>>,
    /// Paths in the module's code.
    paths: Vec<Vec<String>>,
    /// Whether the name is only re-exported.
    exported: BTreeSet<String>,
}

pub struct Crate(BTreeMap<Module, Contents>);

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"))
    })
}

/// Collects the paths of a module's code, nested modules excepted.
struct Paths<'a>(&'a mut Vec<Vec<String>>);

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.0.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_item_mod(&mut self, _: &'ast syn::ItemMod) {}

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        // The arguments of a macro are tokens. Those that parse as expressions are enough.
        type Arguments = syn::punctuated::Punctuated<syn::Expr, syn::Token![,]>;
        if let Ok(arguments) = call.parse_body_with(Arguments::parse_terminated) {
            arguments.iter().for_each(|argument| self.visit_expr(argument));
        }
        visit::visit_macro(self, call);
    }
}

fn leaves(tree: &UseTree, prefix: &[String], contents: &mut Contents, exported: bool) {
    let joined = |name: &syn::Ident| [prefix, &[name.to_string()]].concat();
    match tree {
        UseTree::Path(path) => leaves(&path.tree, &joined(&path.ident), contents, exported),
        UseTree::Group(group) => {
            group.items.iter().for_each(|tree| leaves(tree, prefix, contents, exported));
        }
        UseTree::Glob(_) => contents.globs.push(prefix.to_vec()),
        UseTree::Name(name) => {
            let (key, path) = match name.ident.to_string() {
                own if own == "self" => {
                    (prefix.last().cloned().unwrap_or_default(), prefix.to_vec())
                }
                other => (other, joined(&name.ident)),
            };
            contents.imported.insert(key.clone(), path);
            if exported {
                contents.exported.insert(key);
            }
        }
        UseTree::Rename(rename) => {
            let key = rename.rename.to_string();
            contents.imported.insert(key.clone(), joined(&rename.ident));
            if exported {
                contents.exported.insert(key);
            }
        }
    }
}

impl Crate {
    /// Reads the modules below a crate's `lib.rs`.
    pub fn read(lib: &Path) -> Self {
        let mut modules = BTreeMap::new();
        let dir = lib.parent().map(Path::to_owned).unwrap_or_default();
        read_file(lib, &dir, Vec::new(), &mut modules);
        Self(modules)
    }

    /// Every file, with the files that it uses.
    pub fn uses(&self) -> BTreeMap<PathBuf, BTreeSet<PathBuf>> {
        let mut all: BTreeMap<PathBuf, BTreeSet<PathBuf>> = BTreeMap::new();
        for (module, contents) in &self.0 {
            let used = all.entry(contents.file.clone()).or_default();
            let mut add = |path: &[String]| {
                if let Some(file) = self.file_of(module, path, 0)
                    && file != contents.file
                {
                    used.insert(file);
                }
            };
            for (name, path) in &contents.imported {
                if !contents.exported.contains(name) {
                    add(path);
                }
            }
            contents.paths.iter().for_each(|path| add(path));
        }
        all
    }

    /// The file that defines what `path` names in `module`; `None` for other crates' items.
    fn file_of(&self, module: &[String], path: &[String], depth: usize) -> Option<PathBuf> {
        if depth > 16 {
            return None;
        }
        let mut at = module.to_vec();
        let mut rest = path;
        let mut absolute = false;
        while let [first, tail @ ..] = rest {
            match first.as_str() {
                "crate" => at.clear(),
                "self" => {}
                "super" => drop(at.pop()),
                _ => break,
            }
            absolute = true;
            rest = tail;
        }
        let mut entered = false;
        while let [name, tail @ ..] = rest {
            let contents = self.0.get(&at)?;
            let child = [at.as_slice(), std::slice::from_ref(name)].concat();
            if self.0.contains_key(&child) {
                at = child;
                rest = tail;
                entered = true;
                continue;
            }
            if contents.defined.contains(name) {
                return Some(contents.file.clone());
            }
            if let Some(target) = contents.imported.get(name) {
                let whole = [target.as_slice(), tail].concat();
                return self.file_of(&at, &whole, depth + 1);
            }
            for glob in &contents.globs {
                let whole = [glob.as_slice(), rest].concat();
                if let Some(file) = self.file_of(&at, &whole, depth + 1)
                    && file != contents.file
                {
                    return Some(file);
                }
            }
            // A name of the prelude, of a macro, or of another crate.
            return (absolute || entered).then(|| contents.file.clone());
        }
        // The path ends in a module, which is named to reach its items.
        None
    }

    /// The structs, enums and traits, each with the file that defines it.
    pub fn types(&self) -> Vec<(String, PathBuf)> {
        let named = |contents: &Contents| -> Vec<(String, PathBuf)> {
            contents.types.iter().map(|name| (name.clone(), contents.file.clone())).collect()
        };
        self.0.values().flat_map(named).collect()
    }
}

fn read_file(file: &Path, dir: &Path, module: Module, modules: &mut BTreeMap<Module, Contents>) {
    let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    read_items(&parsed.items, file, dir, module, modules);
}

fn read_items(
    items: &[Item],
    file: &Path,
    dir: &Path,
    module: Module,
    modules: &mut BTreeMap<Module, Contents>,
) {
    let mut contents = Contents { file: file.to_owned(), ..Contents::default() };
    for item in items {
        match item {
            Item::Mod(inner) if is_test(&inner.attrs) => {}
            Item::Mod(inner) => {
                let name = inner.ident.to_string();
                let below = [module.as_slice(), std::slice::from_ref(&name)].concat();
                match &inner.content {
                    Some((_, items)) => read_items(items, file, dir, below, modules),
                    None => {
                        let (flat, folder) = (dir.join(format!("{name}.rs")), dir.join(&name));
                        // A module with `#[path]` is outside the crate's folder.
                        if flat.is_file() {
                            read_file(&flat, &folder, below, modules);
                        } else if folder.join("mod.rs").is_file() {
                            read_file(&folder.join("mod.rs"), &folder, below, modules);
                        }
                    }
                }
            }
            Item::Use(ItemUse { tree, vis, .. }) => {
                let exported = !matches!(vis, Visibility::Inherited);
                leaves(tree, &[], &mut contents, exported);
            }
            other => {
                contents.defined.extend(name_of(other));
                if matches!(other, Item::Struct(_) | Item::Enum(_) | Item::Trait(_)) {
                    contents.types.extend(name_of(other));
                }
                Paths(&mut contents.paths).visit_item(other);
            }
        }
    }
    modules.insert(module, contents);
}

fn name_of(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

/// The groups of files that use each other in a circle, each with its edges.
pub fn cycles(uses: &BTreeMap<PathBuf, BTreeSet<PathBuf>>) -> Vec<Vec<(PathBuf, PathBuf)>> {
    let reach = |from: &PathBuf| {
        let (mut seen, mut todo) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(file) = todo.pop() {
            for next in uses.get(&file).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    todo.push(next.clone());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&PathBuf, BTreeSet<PathBuf>> =
        uses.keys().map(|file| (file, reach(file))).collect();
    let mutual = |a: &PathBuf, b: &PathBuf| reached[a].contains(b) && reached[b].contains(a);
    let mut done: BTreeSet<&PathBuf> = BTreeSet::new();
    let mut found = Vec::new();
    for file in uses.keys().filter(|file| reached[*file].contains(*file)) {
        if !done.insert(file) {
            continue;
        }
        let ring: Vec<&PathBuf> = uses.keys().filter(|f| *f == file || mutual(file, f)).collect();
        done.extend(&ring);
        let edges = ring.iter().flat_map(|from| {
            let inside = uses[*from].iter().filter(|to| ring.contains(to));
            inside.map(|to| ((*from).clone(), to.clone()))
        });
        found.push(edges.collect());
    }
    found
}
