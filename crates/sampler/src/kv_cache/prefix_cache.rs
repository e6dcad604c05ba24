//! The prefix cache: a tree of computed pages, found by the exact tokens that they hold.
//!
//! A node is a page, and its path from the root is the tokens from position 0. There is one root for
//! each set of weights and API key. Nodes are full pages, except for copies of partly filled last pages, which are
//! leaves. An index, ordered by parent and tokens, finds a child; tokens are compared, never only
//! hashed.
//!
//! Invariants: a sequence that uses a node uses all its ancestors. A node becomes unused before its
//! ancestors do, so the node that has been unused for the longest time is a leaf. Only unused nodes are
//! evicted.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::take;

use hone_core::types::TokenId;

use super::Page;
use super::page::PAGE;

/// Identifies weights: keys and values that other weights computed are never used. The default is the
/// base model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct WeightsId(pub u64);

/// Whose pages a sequence may share. Pages that the requests of another API key computed would reveal what they asked,
/// by the number of cached tokens and by the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CacheSpace {
    weights: WeightsId,
    /// A hash of the key's name; 0 without a key, and for samples of rollouts.
    owner: u64,
}

impl CacheSpace {
    pub fn of(weights: WeightsId, owner: Option<&str>) -> Self {
        let mut hasher = DefaultHasher::new();
        let owner = owner.map_or(0, |owner| {
            owner.hash(&mut hasher);
            hasher.finish()
        });
        Self { weights, owner }
    }
}

impl From<WeightsId> for CacheSpace {
    fn from(weights: WeightsId) -> Self {
        Self::of(weights, None)
    }
}

type NodeId = usize;

/// The page before the first, or a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CachePlace {
    Root(CacheSpace),
    Node(NodeId),
}

/// The tokens of a page. [`NO_TOKEN`] fills a partly filled page.
type PageTokens = [TokenId; PAGE];

/// Larger than every token.
const NO_TOKEN: TokenId = TokenId::MAX;

fn page_tokens(tokens: &[TokenId]) -> PageTokens {
    let mut padded = [NO_TOKEN; PAGE];
    padded.iter_mut().zip(tokens).for_each(|(padded, token)| *padded = *token);
    padded
}

struct CacheNode {
    parent: CachePlace,
    space: CacheSpace,
    tokens: PageTokens,
    page: Page,
    users: usize,
    /// When it became unused; the key in `unused`.
    since: u64,
}

/// A cached page that begins as wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheMatch {
    pub node: NodeId,
    pub same: usize,
}

#[derive(Default)]
pub(super) struct PrefixCache {
    nodes: Vec<CacheNode>,
    vacant: Vec<NodeId>,
    children: BTreeMap<(CachePlace, PageTokens), NodeId>,
    /// The nodes without users, in the order in which they became unused or were last copied.
    unused: BTreeMap<u64, NodeId>,
    clock: u64,
    /// The weights whose unused pages are kept; `None` keeps all.
    kept: Option<Vec<WeightsId>>,
}

impl PrefixCache {
    pub fn unused(&self) -> usize {
        self.unused.len()
    }

    pub fn page(&self, node: NodeId) -> &Page {
        &self.nodes[node].page
    }

    /// The child whose first tokens agree with most of `tokens`, which are at most a page. `None` if no
    /// child's first token does.
    pub fn closest(&self, parent: CachePlace, tokens: &[TokenId]) -> Option<CacheMatch> {
        let wanted = (parent, page_tokens(tokens));
        // In the order of the tokens, the child that agrees longest is a neighbor.
        let after = self.children.range(wanted..).next();
        let before = self.children.range(..wanted).next_back();
        let matches = [after, before].into_iter().flatten().filter(|(key, _)| key.0 == parent);
        let matches = matches.map(|((_, found), node)| {
            let same = tokens.iter().zip(found).take_while(|(a, b)| a == b).count();
            CacheMatch { node: *node, same }
        });
        matches.max_by_key(|found| found.same).filter(|found| found.same > 0)
    }

    /// How many of the first pages of `tokens` are in use.
    pub fn used_pages(&self, space: CacheSpace, tokens: &[TokenId]) -> usize {
        let mut at = CachePlace::Root(space);
        let used = |tokens: &&[TokenId]| {
            let found = self.children.get(&(at, page_tokens(tokens)));
            let found = found.filter(|node| self.nodes[**node].users > 0);
            if let Some(node) = found {
                at = CachePlace::Node(*node);
            }
            found.is_some()
        };
        tokens.chunks_exact(PAGE).take_while(used).count()
    }

    /// Adds a page, with one user or none.
    pub fn insert(
        &mut self,
        parent: CachePlace,
        space: CacheSpace,
        tokens: &[TokenId],
        page: Page,
        users: usize,
    ) -> NodeId {
        let tokens = page_tokens(tokens);
        let added = CacheNode { parent, space, tokens, page, users, since: 0 };
        let node = match self.vacant.pop() {
            Some(node) => {
                self.nodes[node] = added;
                node
            }
            None => {
                self.nodes.push(added);
                self.nodes.len() - 1
            }
        };
        self.children.insert((parent, tokens), node);
        if users == 0 {
            self.set_unused(node);
        }
        node
    }

    /// Adds a user. Returns whether the node had none.
    pub fn acquire(&mut self, node: NodeId) -> bool {
        let node = &mut self.nodes[node];
        node.users += 1;
        node.users == 1 && self.unused.remove(&node.since).is_some()
    }

    /// Ends one use of a node and of its ancestors. Returns how many nodes became unused, and adds the
    /// pages that are not kept to `free`.
    pub fn release(&mut self, mut at: CachePlace, free: &mut Vec<Page>) -> usize {
        let mut count = 0;
        while let CachePlace::Node(id) = at {
            let node = &mut self.nodes[id];
            node.users -= 1;
            at = node.parent;
            if node.users > 0 {
                continue;
            }
            count += 1;
            if self.keeps(self.nodes[id].space) {
                self.set_unused(id);
            } else {
                free.push(self.remove(id));
            }
        }
        count
    }

    /// Makes an unused node the last to be evicted, because it was copied.
    pub fn touch(&mut self, node: NodeId) {
        if self.unused.remove(&self.nodes[node].since).is_some() {
            self.set_unused(node);
        }
    }

    /// Removes the page that has been unused for the longest time.
    pub fn evict(&mut self) -> Option<Page> {
        let (_, node) = self.unused.pop_first()?;
        Some(self.remove(node))
    }

    /// Whether unused pages of the space's weights stay.
    pub fn keeps(&self, space: CacheSpace) -> bool {
        self.kept.as_ref().is_none_or(|kept| kept.contains(&space.weights))
    }

    /// Keeps only pages of these weights, and those in use. Adds the others to `free`.
    pub fn keep_only(&mut self, weights: &[WeightsId], free: &mut Vec<Page>) {
        if self.kept.as_deref() == Some(weights) {
            return;
        }
        self.kept = Some(weights.to_vec());
        let unused = take(&mut self.unused);
        // In the order of eviction, children come before their parents.
        for (since, node) in unused {
            if self.keeps(self.nodes[node].space) {
                self.unused.insert(since, node);
            } else {
                free.push(self.remove(node));
            }
        }
    }

    fn set_unused(&mut self, node: NodeId) {
        self.clock += 1;
        self.nodes[node].since = self.clock;
        self.unused.insert(self.clock, node);
    }

    /// Removes a node that is not in `unused`, and returns its page.
    fn remove(&mut self, node: NodeId) -> Page {
        let removed = &mut self.nodes[node];
        self.children.remove(&(removed.parent, removed.tokens));
        self.vacant.push(node);
        take(&mut removed.page)
    }

    /// Checks the invariants. Returns the number of pages.
    #[cfg(test)]
    pub fn check(&self) -> usize {
        assert_eq!(self.children.len() + self.vacant.len(), self.nodes.len());
        for (&(parent, tokens), &node) in &self.children {
            let found = &self.nodes[node];
            assert_eq!((found.parent, found.tokens), (parent, tokens));
            assert_eq!(found.users == 0, self.unused.get(&found.since) == Some(&node));
            assert_eq!(found.page.owners(), 1 + found.users);
            let CachePlace::Node(parent) = parent else { continue };
            assert!(!self.vacant.contains(&parent), "an evicted page has children");
            let parent = &self.nodes[parent];
            assert!(parent.users >= found.users && parent.space == found.space);
            assert!(parent.users > 0 || parent.since > found.since, "not evicted leaves first");
            assert!(!parent.tokens.contains(&NO_TOKEN), "a partly filled page has children");
        }
        self.children.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: WeightsId = WeightsId(0);
    const SPACE: CacheSpace = CacheSpace { weights: BASE, owner: 0 };
    const ROOT: CachePlace = CachePlace::Root(SPACE);

    fn page() -> Page {
        vec![0.0].into()
    }

    fn full(first: TokenId) -> Vec<TokenId> {
        (first..).take(PAGE).collect()
    }

    #[test]
    fn the_child_that_agrees_longest_is_found() {
        let mut cache = PrefixCache::default();
        assert_eq!(cache.closest(ROOT, &[1]), None);
        let mut add = |tokens: &[TokenId]| cache.insert(ROOT, SPACE, tokens, page(), 0);
        let (one, part, two) = (add(&full(1)), add(&[1, 2, 9]), add(&full(40)));
        let found = |tokens: &[TokenId]| cache.closest(ROOT, tokens).map(|m| (m.node, m.same));
        assert_eq!(found(&full(1)), Some((one, 16)));
        assert_eq!(found(&[1, 2, 3, 4]), Some((one, 4)));
        assert_eq!(found(&[1, 2, 9, 4]), Some((part, 3)));
        assert_eq!(found(&[1, 2, 9]), Some((part, 3)));
        assert_eq!(found(&[1, 2, 8]).map(|m| m.1), Some(2));
        assert_eq!(found(&[40, 41, 1]), Some((two, 2)));
        assert_eq!((found(&[0]), found(&[99]), found(&[])), (None, None, None));
        assert_eq!(cache.closest(CachePlace::Node(one), &full(1)), None);
        for other in [WeightsId(1).into(), CacheSpace::of(BASE, Some("other key"))] {
            assert_eq!(cache.closest(CachePlace::Root(other), &full(1)), None);
        }
    }

    #[test]
    fn the_oldest_leaf_is_evicted_and_no_page_in_use() {
        let mut cache = PrefixCache::default();
        let a = cache.insert(ROOT, SPACE, &full(1), page(), 1);
        let b = cache.insert(CachePlace::Node(a), SPACE, &full(2), page(), 1);
        let c = cache.insert(ROOT, SPACE, &full(3), page(), 0);
        let mut free = Vec::new();
        assert_eq!(cache.used_pages(SPACE, &[full(1), full(2), full(3)].concat()), 2);
        assert_eq!(cache.release(CachePlace::Node(b), &mut free), 2);
        cache.touch(c);
        assert!(cache.evict().is_some() && cache.closest(CachePlace::Node(a), &full(2)).is_none());
        assert!(cache.acquire(a) && !cache.acquire(a));
        assert!(cache.evict().is_some() && cache.closest(ROOT, &full(3)).is_none());
        assert!(cache.evict().is_none());
        assert_eq!(cache.release(CachePlace::Node(a), &mut free), 0);
        // Other weights are kept from now on.
        cache.keep_only(&[WeightsId(4)], &mut free);
        assert_eq!((cache.unused(), cache.children.len(), free.len()), (0, 1, 0));
        assert_eq!(cache.release(CachePlace::Node(a), &mut free), 1);
        assert_eq!((cache.unused(), cache.children.len(), free.len()), (0, 0, 1));
        let d = cache.insert(
            CachePlace::Root(WeightsId(4).into()),
            WeightsId(4).into(),
            &full(1),
            page(),
            0,
        );
        cache.keep_only(&[WeightsId(4), BASE], &mut free);
        assert_eq!((cache.unused(), cache.page(d).len()), (1, 1));
        cache.keep_only(&[BASE], &mut free);
        assert_eq!((cache.unused(), free.len()), (0, 2));
    }
}
