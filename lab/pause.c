/* The process that holds a pod's namespaces: it reaps the pod's orphans and waits until it is signalled to stop. */
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int sig) { (void)sig; _exit(0); }
static void reap(int sig) { (void)sig; while (waitpid(-1, 0, WNOHANG) > 0); }

int main(int argc, char **argv)
{
    /* kubeadm's own health check asks for the version, to see a pod end. */
    if (argc > 1 && !strcmp(argv[1], "-v"))
        return 0;
    signal(SIGINT, leave);
    signal(SIGTERM, leave);
    signal(SIGCHLD, reap);
    for (;;)
        pause();
}
