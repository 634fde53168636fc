"""An ordinary multiprocessing program: a pool for the work, a process that keeps the score.

Run it, kill it with ``kill -9`` half way, and look what is left in ``ps``. Its twin
01_swapped_import_after.py differs in one line, the import, and leaves nothing.
"""

import multiprocessing as mp


def count_primes(bounds):
    """Tell how many primes lie from ``bounds[0]`` up to but not including ``bounds[1]``."""
    low, high = bounds
    return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(max(low, 2), high))


def keep_score(scores, total):
    """Add up what comes in until None comes."""
    for score in iter(scores.get, None):
        with total.get_lock():
            total.value += score


def main():
    scores = mp.Queue()
    total = mp.Value("l", 0)
    keeper = mp.Process(target=keep_score, args=(scores, total), name="score keeper")
    keeper.start()

    ranges = [(low, low + 5_000) for low in range(0, 100_000, 5_000)]
    with mp.Pool(2) as pool:
        for score in pool.imap_unordered(count_primes, ranges):
            scores.put(score)

    scores.put(None)
    keeper.join()
    print(f"{total.value} primes below 100,000")


if __name__ == "__main__":
    main()
