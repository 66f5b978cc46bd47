"""The program of the reader process. It ends with its worker even while it loads torch, which takes seconds."""

from pagewire_common.processes.child_process import end_with_the_parent, leave_signals_to_the_parent


def main() -> None:
    end_with_the_parent()
    leave_signals_to_the_parent()
    from worker_service.execution.images.reading import answer_all

    answer_all()


if __name__ == "__main__":
    main()
