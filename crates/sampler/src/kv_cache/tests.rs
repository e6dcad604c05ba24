use std::cell::RefCell;

use proptest::prelude::*;

use hone_core::types::TokenId;

use super::page::pages;
use super::{CacheShape, CacheType, PAGE, Page, PagePool, SequencePages, WeightsId};

const SHAPE: CacheShape = CacheShape { layers: 1, heads: 1, dim: 1, stored: CacheType::F32 };

#[derive(Clone, Copy, Debug)]
enum Action {
    /// The kind of the prompt, its length, the limit, and the weights.
    Start(u8, usize, usize, u64),
    /// Computes up to so many tokens of a sequence's prompt.
    Prefill(usize, usize),
    /// Takes what others have computed.
    Reuse(usize),
    Decode(usize, TokenId),
    End(usize),
    Keep(u64),
    /// Prepares pages while nothing else happens.
    Prepare,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => (0..3_u8, 1..70_usize, 1..50_usize, 0..2_u64)
            .prop_map(|(kind, len, limit, weights)| Action::Start(kind, len, limit, weights)),
        6 => (0..8_usize, 1..40_usize).prop_map(|(which, count)| Action::Prefill(which, count)),
        2 => (0..8_usize).prop_map(Action::Reuse),
        9 => (0..8_usize, 0..2 as TokenId).prop_map(|(which, token)| Action::Decode(which, token)),
        3 => (0..8_usize).prop_map(Action::End),
        1 => (0..3_u64).prop_map(Action::Keep),
        1 => Just(Action::Prepare),
    ]
}

/// Prompts that agree in their first 20 or 37 tokens.
fn prompt(kind: u8, len: usize) -> Vec<TokenId> {
    let differs = [usize::MAX, 20, 37][usize::from(kind)];
    (0..len).map(|i| (i % 7) as TokenId + if i >= differs { 10 } else { 0 }).collect()
}

/// What a page holds of a position: a function of the weights and of all tokens up to it.
fn value(weights: WeightsId, ids: &[TokenId]) -> f32 {
    let mixed = ids.iter().fold(weights.0 + 1, |sum, id| {
        (sum.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(u64::from(*id) + 1)) >> 7
    });
    (mixed % 1_000_003) as f32
}

/// A sequence with all its tokens, and the steps that it may still decode.
struct Model {
    sequence: SequencePages,
    weights: WeightsId,
    ids: Vec<TokenId>,
    limit: usize,
}

thread_local! {
    /// The values of the pages of [`PagePool::on_device`], by number.
    static DEVICE: RefCell<Vec<[f32; PAGE]>> = const { RefCell::new(Vec::new()) };
}

/// Makes the copies that a device has to make before it computes.
fn copy_on_device(pool: &mut PagePool) {
    let copies = pool.take_copies();
    DEVICE.with_borrow_mut(|pages| {
        for [from, to] in copies.iter().map(|copy| copy.map(|page| page as usize)) {
            // What is copied was written, and not to the same page.
            assert!(from != to && !pages[from][0].is_nan(), "{from} to {to}");
            pages[to] = pages[from];
        }
    });
}

impl Model {
    fn compute(&mut self, pool: &mut PagePool, count: usize) {
        let begun = self.sequence.pages().len();
        assert!(self.sequence.ensure_pages(pool, count));
        copy_on_device(pool);
        let is_on_device = self.sequence.pages().iter().any(|page| page.is_empty());
        DEVICE.with_borrow_mut(|device| {
            // What a page held in its last use must not be read.
            for page in self.sequence.pages()[begun..].iter().filter(|_| is_on_device) {
                device[page.number() as usize] = [f32::NAN; PAGE];
            }
            for offset in 0..count {
                let position = self.sequence.position(offset);
                assert_eq!(self.sequence.token(offset), Some(self.ids[position]));
                let value = value(self.weights, &self.ids[..=position]);
                let pages = self.sequence.next_pages(offset + 1).unwrap();
                let page = pages.last_mut().unwrap();
                let (number, own) = (page.number() as usize, page.values_mut().unwrap());
                if is_on_device {
                    device[number][position % PAGE] = value;
                } else {
                    SHAPE.write(own, (0, 0, position % PAGE), &[value], &[-value]);
                }
            }
        });
        self.sequence.advance(count);
    }

    fn check(&self) {
        for position in 0..self.sequence.len() {
            let page = &self.sequence.pages()[position / PAGE];
            let expected = value(self.weights, &self.ids[..=position]);
            let found = if page.is_empty() {
                let number = page.number() as usize;
                DEVICE.with_borrow(|pages| pages[number][position % PAGE])
            } else {
                assert_eq!(page[PAGE + position % PAGE], -expected);
                page[position % PAGE]
            };
            assert_eq!(found, expected, "position {position}");
        }
    }
}

/// No other sequence, and no cached prefix, has a page that a sequence still writes.
fn check_writers(running: &[Model]) {
    let written = |model: &Model| model.sequence.len() / PAGE..model.sequence.pages().len();
    let mut all: Vec<u32> = Vec::new();
    for model in running {
        let own = &model.sequence.pages()[written(model)];
        assert!(own.iter().all(|page| page.owners() == 1));
        all.extend(own.iter().map(Page::number));
    }
    for (i, model) in running.iter().enumerate() {
        // The numbers of all written pages are different, and of none that is only read.
        let mut read = model.sequence.pages()[..written(model).start].iter().map(Page::number);
        assert!(read.all(|number| !all.contains(&number)), "sequence {i}");
    }
    all.sort_unstable();
    assert!(all.windows(2).all(|pair| pair[0] != pair[1]), "{all:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// In every order of events, every promised page can be taken within the limit, each sequence finds
    /// the keys and values of its own tokens and weights, also on a device that makes the copies before its next pass,
    /// and all pages return to the pool.
    #[test]
    fn promises_hold_and_shared_pages_have_the_values_of_their_tokens(
        actions in prop::collection::vec(action(), 1..120),
        limit in 0..16_usize,
        reuse: bool,
        is_on_device: bool,
    ) {
        DEVICE.set(vec![[f32::NAN; PAGE]; limit]);
        let on_host = PagePool::new(SHAPE, limit);
        let pool = if is_on_device { PagePool::on_device(limit) } else { on_host };
        let mut pool = if reuse { pool } else { pool.without_reuse() };
        let mut running: Vec<Model> = Vec::new();
        for action in actions {
            let computes = matches!(action, Action::Prefill(..) | Action::Decode(..));
            match action {
                Action::Start(kind, len, limit, weights) => {
                    let (ids, weights) = (prompt(kind, len), WeightsId(weights));
                    let available = pool.available();
                    match SequencePages::new(&mut pool, weights, &ids, limit) {
                        Some(sequence) => running.push(Model { sequence, weights, ids, limit }),
                        None => {
                            prop_assert!(pages(len + limit - 1) > available);
                            prop_assert_eq!(pool.available(), available);
                        }
                    }
                }
                Action::Prefill(which, count) => {
                    let Some(model) = running.get_mut(which) else { continue };
                    let count = count.min(model.sequence.remaining());
                    model.compute(&mut pool, count);
                    model.sequence.cache_full_pages(&mut pool);
                    if model.sequence.remaining() == 0 {
                        model.sequence.cache_last_page(&mut pool);
                    }
                }
                Action::Reuse(which) => {
                    let Some(model) = running.get_mut(which) else { continue };
                    let remaining = model.sequence.remaining();
                    let found = model.sequence.take_cached(&mut pool);
                    prop_assert_eq!(model.sequence.remaining(), remaining - found);
                    prop_assert!(reuse || found == 0);
                }
                Action::Decode(which, token) => {
                    let Some(model) = running.get_mut(which) else { continue };
                    if model.sequence.remaining() > 0 || model.limit == 0 {
                        continue;
                    }
                    model.compute(&mut pool, 1);
                    model.sequence.push(token);
                    model.ids.push(token);
                    model.limit -= 1;
                }
                Action::End(which) if which < running.len() => {
                    running.swap_remove(which).sequence.free(&mut pool);
                }
                Action::Keep(weights) => pool.keep_only(&[WeightsId(weights)]),
                Action::Prepare => {
                    // As many as were in use at once, within the limit.
                    let prepared = (0..).take_while(|_| pool.prepare_page()).count();
                    prop_assert!(prepared <= limit);
                }
                Action::End(_) => {}
            }
            pool.check();
            check_writers(&running);
            // Copies of other events wait for the next pass.
            if computes || !is_on_device {
                running.iter().for_each(Model::check);
            }
        }
        for model in running {
            model.sequence.free(&mut pool);
        }
        pool.check();
        prop_assert_eq!((pool.usage()[0], pool.available()), (0, limit));
    }
}

#[test]
fn a_second_sequence_shares_full_pages_and_copies_the_last() {
    let mut pool = PagePool::new(SHAPE, 12);
    let ids = prompt(0, 40);
    let start = |pool: &mut PagePool, ids: &[TokenId], limit| {
        let sequence = SequencePages::new(pool, WeightsId(0), ids, limit).unwrap();
        Model { sequence, weights: WeightsId(0), ids: ids.to_vec(), limit }
    };
    let mut first = start(&mut pool, &ids, 30);
    assert_eq!((first.sequence.remaining(), pool.available()), (39, 12 - 5));
    first.compute(&mut pool, 39);
    first.sequence.cache_last_page(&mut pool);
    // The copy is in the cache only.
    assert_eq!(pool.usage(), [3, 1]);
    let mut second = start(&mut pool, &ids, 30);
    assert_eq!(second.sequence.remaining(), 0);
    // Two pages are shared, so the second needs three more.
    assert_eq!((pool.usage()[0], pool.available()), (4, 12 - 5 - 3));
    for (model, token) in [(&mut first, 1), (&mut second, 2)] {
        model.compute(&mut pool, 1);
        model.sequence.push(token);
        model.ids.push(token);
        model.compute(&mut pool, 1);
        model.check();
    }
    first.check();
    // The next turn continues the first sequence, which has ended.
    while first.sequence.len() < 48 {
        first.sequence.push(9);
        first.ids.push(9);
        first.compute(&mut pool, 1);
    }
    let turn = [first.ids.clone(), vec![5; 10]].concat();
    first.sequence.free(&mut pool);
    second.sequence.free(&mut pool);
    let next = start(&mut pool, &turn, 10);
    assert_eq!(next.sequence.len(), 48);
    next.check();
    next.sequence.free(&mut pool);
    // A prompt that ends with a full page computes its last token again, in a copy.
    let exact = start(&mut pool, &turn[..48], 10);
    assert_eq!((exact.sequence.len(), exact.sequence.remaining()), (47, 0));
    exact.sequence.free(&mut pool);
    pool.check();
}

#[test]
fn a_begun_page_is_replaced_once_the_cache_holds_more_of_it() {
    let mut pool = PagePool::new(SHAPE, 20);
    let start = |pool: &mut PagePool, ids: &[TokenId]| {
        let sequence = SequencePages::new(pool, WeightsId(0), ids, 4).unwrap();
        Model { sequence, weights: WeightsId(0), ids: ids.to_vec(), limit: 4 }
    };
    let finish = |pool: &mut PagePool, model: &mut Model| {
        model.compute(pool, model.sequence.remaining());
        model.sequence.cache_last_page(pool);
    };
    let mut earlier = start(&mut pool, &prompt(1, 30));
    finish(&mut pool, &mut earlier);
    let ids = prompt(0, 40);
    let [mut first, mut copied, mut begun] = [(); 3].map(|()| start(&mut pool, &ids));
    assert_eq!([&first, &copied, &begun].map(|model| model.sequence.len()), [20; 3]);
    begun.compute(&mut pool, 3);
    finish(&mut pool, &mut first);
    for (model, found) in [(&mut copied, 39 - 20), (&mut begun, 39 - 23)] {
        assert_eq!(model.sequence.take_cached(&mut pool), found);
        assert_eq!(model.sequence.take_cached(&mut pool), 0);
        pool.check();
        model.check();
        // Two pages are shared, and the third is its own.
        let shared: Vec<_> = model.sequence.pages().iter().map(|page| page.owners() > 1).collect();
        assert_eq!(shared, [true, true, false]);
    }
    for model in [earlier, first, copied, begun] {
        model.sequence.free(&mut pool);
    }
    pool.check();
    assert_eq!((pool.usage()[0], pool.available()), (0, 20));
}

#[test]
fn unused_pages_are_evicted_by_age_under_pressure() {
    let mut pool = PagePool::new(SHAPE, 6);
    let run = |pool: &mut PagePool, kind: TokenId| {
        let ids = vec![kind; 33];
        let sequence = SequencePages::new(pool, WeightsId(0), &ids, 8).unwrap();
        let found = sequence.len();
        let mut model = Model { sequence, weights: WeightsId(0), ids, limit: 8 };
        let remaining = model.sequence.remaining();
        model.compute(pool, remaining + 1);
        model.check();
        model.sequence.free(pool);
        pool.check();
        found
    };
    assert_eq!((run(&mut pool, 1), run(&mut pool, 2)), (0, 0));
    assert_eq!(pool.usage(), [0, 4]);
    assert_eq!((run(&mut pool, 1), run(&mut pool, 3)), (32, 0));
    assert_eq!(pool.usage()[1], 5, "one page of the second is evicted for the third");
    assert_eq!(run(&mut pool, 1), 32);
    assert_eq!(run(&mut pool, 2), 16, "its first page is left");
}

#[test]
fn prepared_pages_are_used_first() {
    let mut pool = PagePool::new(SHAPE, 5);
    assert!(!pool.prepare_page(), "no page was in use yet");
    let start = |pool: &mut PagePool| {
        let mut sequence = SequencePages::new(pool, WeightsId(0), &prompt(0, 20), 1).unwrap();
        assert!(sequence.ensure_pages(pool, 20));
        sequence
    };
    let sequence = start(&mut pool);
    // Two more pages, because two were in use.
    assert_eq!([(); 3].map(|()| pool.prepare_page()), [true, true, false]);
    let prepared = pool.allocated();
    let other = start(&mut pool);
    assert_eq!((pool.allocated(), pool.usage()[0]), (prepared, 4));
    // The limit allows one more.
    assert_eq!([(); 2].map(|()| pool.prepare_page()), [true, false]);
    [sequence, other].into_iter().for_each(|sequence| sequence.free(&mut pool));
    pool.check();
}

mod slab {
    use super::super::*;

    #[test]
    fn pages_of_all_slabs_are_separate_and_aligned() {
        // Three pages of a slab.
        let len = SLAB_BYTES / size_of::<f32>() / 3;
        let mut allocator = PageAllocator::new(len, 100);
        let mut pages: Vec<Page> = (0..5).map(|_| allocator.allocate()).collect();
        for (i, page) in (0_u8..).zip(&mut pages) {
            assert!(page.iter().step_by(1 << 12).all(|x| *x == 0.0) && page.len() == len);
            let values = page.values_mut().unwrap();
            (values[0], values[len - 1]) = (f32::from(i), -f32::from(i));
            // All pages of a slab are aligned if a page is a number of cache lines.
            let before = usize::from(i) % 3 * len;
            let [aligned, whole] =
                [page.as_ptr().addr() / 4, before].map(|at| at.is_multiple_of(16));
            assert_eq!(aligned, whole);
        }
        drop(allocator);
        let last = pages.pop().unwrap();
        let other = last.clone();
        assert_eq!((other.owners(), other[0], other[len - 1]), (2, 4.0, -4.0));
        for (i, page) in (0_u8..).zip(&pages) {
            assert_eq!((page[0], page[len - 1]), (f32::from(i), -f32::from(i)));
        }
        drop(pages);
        // The slab lives as long as one of its pages.
        drop(last);
        let mut last = other;
        assert_eq!(last[0], 4.0);
        assert!(last.values_mut().is_some());
    }

    #[test]
    fn a_shared_page_is_not_written_and_the_default_is_empty() {
        let mut page = Page::from(vec![1.0, 2.0]);
        let copy = page.clone();
        assert!(page.values_mut().is_none());
        drop(copy);
        page.values_mut().unwrap()[1] = 3.0;
        assert_eq!(page[..], [1.0, 3.0]);
        let mut none = Page::default();
        assert!(none.is_empty() && none.values_mut().is_none() && none.owners() == 0);
        assert_eq!(PageAllocator::new(0, 0).allocate().len(), 0);
    }

    #[test]
    fn threads_write_different_pages_of_one_slab() {
        let mut allocator = PageAllocator::new(32, 8);
        let mut pages: Vec<Page> = (0..8).map(|_| allocator.allocate()).collect();
        std::thread::scope(|scope| {
            for (i, page) in (0_u8..).zip(&mut pages) {
                scope.spawn(move || page.values_mut().unwrap().fill(f32::from(i)));
            }
        });
        for (i, page) in (0_u8..).zip(&pages) {
            assert!(page.iter().all(|x| *x == f32::from(i)));
        }
    }
}
