// SPDX-License-Identifier: GPL-3.0-or-later

// kubelet's own plugin manager and DRA manager without the rest of kubelet, for test_dra_kubelet.py: it prepares and
// unprepares the claims of pods as a line on its standard input says ("prepare namespace/name"), and answers in JSON.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
)

type kubelet struct {
	client  kubernetes.Interface
	manager *dra.Manager
	lock    sync.Mutex
	active  map[string]*v1.Pod
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func (k *kubelet) pods() []*v1.Pod {
	k.lock.Lock()
	defer k.lock.Unlock()
	var found []*v1.Pod
	for _, pod := range k.active {
		found = append(found, pod)
	}
	return found
}

// The CDI names of each container, or an error.
func (k *kubelet) serve(ctx context.Context, verb, key string) (map[string][]string, error) {
	namespace, name, _ := strings.Cut(key, "/")
	pod, err := k.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	k.lock.Lock()
	k.active[key] = pod
	k.lock.Unlock()
	given := map[string][]string{}
	if verb == "unprepare" {
		if err := k.manager.UnprepareResources(ctx, pod); err != nil {
			return nil, err
		}
		k.lock.Lock()
		delete(k.active, key)
		k.lock.Unlock()
		return given, nil
	}
	if err := k.manager.PrepareResources(ctx, pod); err != nil {
		return nil, err
	}
	for i := range pod.Spec.Containers {
		container := &pod.Spec.Containers[i]
		info, err := k.manager.GetResources(pod, container)
		if err != nil {
			return nil, err
		}
		given[container.Name] = []string{}
		for _, device := range info.CDIDevices {
			given[container.Name] = append(given[container.Name], device.Name)
		}
	}
	return given, nil
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "of an administrator")
	root := flag.String("root", "", "kubelet's folder")
	node := flag.String("node", "", "the node's name")
	klog.InitFlags(nil)
	flag.Parse()
	ctx := context.Background()
	access, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	must(err)
	client := kubernetes.NewForConfigOrDie(access)
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	manager, err := dra.NewManager(klog.Background(), client, *root)
	must(err)
	own := &kubelet{client: client, manager: manager, active: map[string]*v1.Pod{}}
	getNode := func(ctx context.Context) (*v1.Node, error) {
		return client.CoreV1().Nodes().Get(ctx, *node, metav1.GetOptions{})
	}
	// kubelet knows the node's pods before it unprepares claims of others; from 1.37 on those are refused to pods then.
	mine, err := client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + *node})
	must(err)
	for i := range mine.Items {
		own.active[mine.Items[i].Namespace+"/"+mine.Items[i].Name] = &mine.Items[i]
	}
	must(manager.Start(ctx, own.pods, getNode, ready))
	plugins := pluginmanager.NewPluginManager(filepath.Join(*root, "plugins_registry"), record.NewFakeRecorder(1000))
	plugins.AddHandler(registration.DRAPlugin, manager.GetWatcherHandler())
	go plugins.Run(ctx, ready, make(chan struct{}))
	answers, lines := json.NewEncoder(os.Stdout), bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		verb, key, _ := strings.Cut(lines.Text(), " ")
		given, err := own.serve(ctx, verb, key)
		if err != nil {
			must(answers.Encode(map[string]string{"error": err.Error()}))
			continue
		}
		must(answers.Encode(map[string]any{"given": given}))
	}
}
