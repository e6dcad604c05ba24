//! Resident memory of this process, from Linux's `/proc/self`. Every value is 0 on other systems.
//! [`trim`] and [`trim_unused`] reduce it. [`prefer_huge_pages`] and [`collect_into_huge_pages`] make large blocks faster to read.

use std::fs;

/// Bytes of memory that are resident now.
pub fn resident() -> u64 {
    status("VmRSS:")
}

/// Largest number of resident bytes since the process started, or since [`reset_peak`].
pub fn peak_resident() -> u64 {
    status("VmHWM:")
}

/// Sets [`peak_resident`] to the current value (`/proc/pid/clear_refs` in proc(5)). Returns whether
/// the system allowed it.
pub fn reset_peak() -> bool {
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// Returns freed pages to the operating system. glibc keeps them for later allocations; with another
/// C library this does nothing. Stops all threads that allocate meanwhile.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: malloc_trim takes no pointer and may be called at any time from any thread.
        unsafe { libc::malloc_trim(0) };
    }
}

/// Free bytes that the allocator may keep before [`trim_unused`] returns them.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAX_UNUSED: usize = 64 << 20;

/// [`trim`], if glibc keeps more than 64 MiB and more than half as much as is in use. Bodies of some megabytes
/// leave so much in each thread's arena, and glibc alone never returns it.
///
/// Returns the bytes that were free.
pub fn trim_unused() -> Option<usize> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: mallinfo2 takes no pointer, and locks each arena while it reads it.
        let info = unsafe { libc::mallinfo2() };
        let in_use = info.uordblks + info.hblkhd;
        if info.fordblks > MAX_UNUSED.max(in_use / 2) {
            trim();
            return Some(info.fordblks);
        }
    }
    None
}

/// Asks the system to back a large block that is not used yet with huge pages, of which a processor needs to
/// look up fewer addresses. Memory is then taken in units of usually 2 MiB.
///
/// Changes no value, and has no effect where the system is not Linux, does not have huge pages or does not
/// permit them (`/sys/kernel/mm/transparent_hugepage/enabled`).
pub fn prefer_huge_pages<T>(block: &[T]) {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    huge_pages::prefer(block);
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    let _unsupported = block;
}

/// [`prefer_huge_pages`] for a block that is filled already: Linux from 6.1 on copies it into huge pages at
/// once, as far as whole ones fit in it and what follows it in memory.
pub fn collect_into_huge_pages<T>(block: &[T]) {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    huge_pages::collect(block);
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    let _unsupported = block;
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod huge_pages {
    use std::ffi::c_int;
    use std::fs;
    use std::sync::OnceLock;

    /// Bytes of a huge page on most systems.
    const SIZE: usize = 2 << 20;

    /// Blocks below this size are left as they are.
    const LEAST: usize = 64 << 10;

    /// Whether the administrator permits huge pages for processes that ask for them.
    fn permitted() -> bool {
        static PERMITTED: OnceLock<bool> = OnceLock::new();
        let read = || fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        *PERMITTED.get_or_init(|| read().is_ok_and(|choice| !choice.contains("[never]")))
    }

    pub fn prefer<T>(block: &[T]) {
        if size_of_val(block) >= LEAST && permitted() {
            advise(block, page_size(), libc::MADV_HUGEPAGE);
        }
    }

    pub fn collect<T>(block: &[T]) {
        if size_of_val(block) < LEAST || !permitted() {
            return;
        }
        advise(block, page_size(), libc::MADV_HUGEPAGE);
        // A block that is smaller than a huge page may share one with its neighbors. If these are memory of
        // another kind, the system refuses.
        if !advise(block, SIZE, libc::MADV_COLLAPSE) {
            advise(block, page_size(), libc::MADV_COLLAPSE);
        }
    }

    fn page_size() -> usize {
        // SAFETY: sysconf takes no pointer and may be called at any time from any thread.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
    }

    /// Gives advice about the memory that contains the block, from one multiple of `unit` to another. Returns
    /// whether the system accepted it.
    fn advise<T>(block: &[T], unit: usize, advice: c_int) -> bool {
        let start = block.as_ptr().addr() / unit * unit;
        let end = (block.as_ptr().addr() + size_of_val(block)).next_multiple_of(unit);
        // SAFETY: the two kinds of advice that callers give do not change the content of any memory, also not
        // of that around the block, and the address is not accessed otherwise.
        unsafe { libc::madvise(std::ptr::without_provenance_mut(start), end - start, advice) == 0 }
    }
}

/// The bytes of an entry of `/proc/self/status` that is given in kB.
fn status(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    line.split_whitespace().next().and_then(|kb| kb.parse::<u64>().ok()).unwrap_or_default() << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_change_no_value() {
        for len in [0_usize, 100, 300_000, 3 << 20] {
            let mut block = vec![0_u32; len];
            prefer_huge_pages(&block);
            assert!(block.iter().all(|x| *x == 0));
            block.iter_mut().zip(0..).for_each(|(x, i)| *x = i);
            collect_into_huge_pages(&block);
            collect_into_huge_pages(&block[len / 3..len / 2]);
            assert!(block.iter().zip(0..).all(|(x, i)| *x == i));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn touched_memory_is_resident() {
        // Other tests allocate and free at the same time, so only this block is certain.
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        assert!(resident() >= 64 << 20, "{}", resident());
        assert!(peak_resident() >= 64 << 20, "{}", peak_resident());
        drop(block);
        trim();
    }
}
