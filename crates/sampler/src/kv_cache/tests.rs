use std::sync::Arc;

use proptest::prelude::*;

use super::{CacheShape, PAGE, PagePool, PromptPages, SequencePages, pages};

const SHAPE: CacheShape = CacheShape { layers: 2, heads: 3, dim: 4 };

#[derive(Clone, Copy, Debug)]
enum Act {
    Prompt(usize),
    Sequence(usize, usize),
    Grow(usize),
    End(usize),
    Forget(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (0..60_usize).prop_map(Act::Prompt),
        (0..8_usize, 1..60_usize).prop_map(|(prompt, limit)| Act::Sequence(prompt, limit)),
        (0..8_usize).prop_map(Act::Grow),
        (0..8_usize).prop_map(Act::End),
        (0..8_usize).prop_map(Act::Forget),
    ]
}

proptest! {
    /// Whatever happens, pages are promised no more than there may be, every promise is kept, and all
    /// come back.
    #[test]
    fn the_pool_keeps_its_promises(acts in prop::collection::vec(act(), 1..80), limit in 0..12_usize) {
        let mut pool = PagePool::new(SHAPE, limit);
        let mut prompts: Vec<Arc<PromptPages>> = Vec::new();
        let mut running: Vec<(SequencePages, usize, usize)> = Vec::new();
        for act in acts {
            let before = pool.available();
            match act {
                Act::Prompt(len) => match PromptPages::new(&mut pool, vec![1; len]) {
                    Some(prompt) => prompts.push(Arc::new(prompt)),
                    None => {
                        prop_assert!(pages(len.saturating_sub(1)) > before);
                        prop_assert_eq!(pool.available(), before);
                    }
                },
                Act::Sequence(prompt, limit) => {
                    let Some(prompt) = prompts.get(prompt) else { continue };
                    match SequencePages::new(&mut pool, prompt, limit) {
                        Some(sequence) => running.push((sequence, 0, limit)),
                        None => prop_assert!(pages(limit) > before),
                    }
                }
                Act::Grow(which) => {
                    let Some((sequence, len, limit)) = running.get_mut(which) else { continue };
                    let room = sequence.make_room(&mut pool);
                    prop_assert!(room || *len >= *limit);
                    if room {
                        prop_assert!(sequence.place().is_some());
                        sequence.advance();
                        *len += 1;
                        prop_assert!(*len <= limit.next_multiple_of(PAGE));
                    }
                }
                Act::End(which) if which < running.len() => {
                    running.swap_remove(which).0.free(&mut pool);
                }
                Act::Forget(which) if which < prompts.len() => {
                    let prompt = prompts.swap_remove(which);
                    match Arc::try_unwrap(prompt) {
                        Ok(prompt) => prompt.free(&mut pool),
                        Err(prompt) => prompts.push(prompt),
                    }
                }
                Act::End(_) | Act::Forget(_) => {}
            }
            let held: usize = prompts.iter().map(|p| pages(PromptPages::shared(p.ids()))).sum();
            let promised: usize = running.iter().map(|(_, _, limit)| pages(*limit)).sum();
            prop_assert_eq!(pool.reserved(), held + promised);
            prop_assert!(pool.reserved() <= limit && pool.made() <= limit);
        }
        for (sequence, ..) in running {
            sequence.free(&mut pool);
        }
        for prompt in prompts {
            Arc::into_inner(prompt).unwrap().free(&mut pool);
        }
        prop_assert_eq!((pool.reserved(), pool.available()), (0, limit));
    }
}

#[test]
fn a_key_is_found_in_its_column() {
    let mut page = vec![0.0; SHAPE.page()].into_boxed_slice();
    SHAPE.write(&mut page, (1, 2, 5), &[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0, 7.0, 8.0]);
    let part = &page[SHAPE.keys(1, 2)];
    assert_eq!((part[5], part[PAGE + 5], part[3 * PAGE + 5]), (1.0, 2.0, 4.0));
    assert_eq!(part[4 * PAGE + 5 * 4..][..4], [5.0, 6.0, 7.0, 8.0]);
    assert_eq!(page.iter().filter(|x| **x != 0.0).count(), 8);
}
