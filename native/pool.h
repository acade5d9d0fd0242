// Runs the chunks of an operation on several threads.
//
// TensorFlow's C API does not give its own thread pool to kernels. These threads sleep between operations.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "simd.h"

class Pool {
 public:
  // Calls `work(i)` for each i below `count`, on this thread and at most `threads` - 1 others. Returns whether no call
  // has thrown an exception: these do not leave a thread.
  static bool run(int64_t count, int64_t threads, const std::function<void(int64_t)>& work) {
    auto job = std::make_shared<Job>(count, &work);
    const int64_t helpers = std::min(threads, count) - 1;
    if (helpers > 0) instance()->add(job, helpers);
    job->work_on();
    job->wait();
    return !job->failed;
  }

 private:
  struct Job {
    Job(int64_t count, const std::function<void(int64_t)>* work) : count(count), work(work) {}

    void work_on() {
      const FlushSubnormals flush;
      for (int64_t i = next++; i < count; i = next++) {
        try {
          (*work)(i);
        } catch (...) {  // out of memory
          failed = true;
        }
        if (++done == count) {
          const std::lock_guard<std::mutex> lock(mutex);
          finished.notify_all();
        }
      }
    }

    void wait() {
      std::unique_lock<std::mutex> lock(mutex);
      finished.wait(lock, [this] { return done == count; });
    }

    const int64_t count;
    const std::function<void(int64_t)>* const work;  // not read once `next` has reached `count`
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;
    std::condition_variable finished;
  };

  // Never destroyed: its threads may outlive static objects. A forked child has none of them, and makes its own pool.
  static Pool*& instance() {
    static Pool* pool = [] {
      pthread_atfork(nullptr, nullptr, [] { instance() = new Pool; });
      return new Pool;
    }();
    return pool;
  }

  void add(const std::shared_ptr<Job>& job, int64_t helpers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      for (; threads_ < helpers; ++threads_) std::thread([this] { help(); }).detach();
      for (int64_t i = 0; i < helpers; ++i) waiting_.push_back(job);
    } catch (const std::exception&) {  // no more threads or memory: this thread does the rest itself
    }
    added_.notify_all();
  }

  void help() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        added_.wait(lock, [this] { return !waiting_.empty(); });
        job = waiting_.front();
        waiting_.pop_front();
      }
      job->work_on();
    }
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::shared_ptr<Job>> waiting_;
  int64_t threads_ = 0;
};
